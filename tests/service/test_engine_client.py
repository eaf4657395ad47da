"""Who gets which output of the engine, without an engine."""

from __future__ import annotations

import asyncio

import pytest

from service.engine_client import EngineClient, EngineRejectedError, EngineUnavailableError
from speculation.messages import (
    Abort,
    Command,
    Ready,
    Rejected,
    SamplingParams,
    SequenceOutput,
    StepOutputs,
    Submit,
)

READY = Ready(
    model_fingerprint="f",
    model_folder=".",
    max_model_len=100,
    vocab_size=10,
    num_blocks=10,
    block_size=16,
    methods=["none"],
    max_waiting=4,
    description="",
)


def submit(request_id: str) -> Submit:
    return Submit(request_id=request_id, prompt_token_ids=[1], sampling=SamplingParams())


def output(request_id: str, token_id: int, finish_reason: str | None = None) -> SequenceOutput:
    return SequenceOutput(request_id=request_id, token_ids=[token_id], finish_reason=finish_reason)


@pytest.fixture
def sent() -> list[Command]:
    return []


@pytest.fixture
def client(sent: list[Command]) -> EngineClient:
    """A client with an engine that only listens."""
    client = EngineClient(lambda stats: None, lambda gap: None)
    client.attach(READY, sent.append)
    return client


async def test_outputs_wait_until_they_are_taken(client: EngineClient) -> None:
    """What arrived meanwhile comes at once and in order; nobody else's is among it."""
    async with client.submit([submit("a"), submit("b")]) as stream:
        client.dispatch(StepOutputs([output("a", 1), output("b", 2), output("x", 9)]))
        client.dispatch(StepOutputs([output("a", 3, "length")]))
        assert [(o.request_id, o.token_ids) for o in await stream.take()] == [("a", [1]), ("b", [2]), ("a", [3])]
        client.dispatch(StepOutputs([output("b", 4, "stop")]))
        await stream.take()
        assert stream.is_finished
    assert client.num_live == 0


async def test_leaving_aborts_what_still_runs(client: EngineClient, sent: list[Command]) -> None:
    """Only sequences that have not ended are aborted, and their later outputs are dropped."""
    async with client.submit([submit("a"), submit("b")]):
        client.dispatch(StepOutputs([output("a", 1, "length")]))
    assert sent[2:] == [Abort("b")]
    client.dispatch(StepOutputs([output("b", 2)]))
    assert client.num_live == 0


async def test_what_arrived_before_the_engine_died_is_not_lost(client: EngineClient) -> None:
    """Outputs come first, then the error; the dead engine is sent nothing more."""
    async with client.submit([submit("a")]) as stream:
        client.dispatch(StepOutputs([output("a", 1)]))
        client.detach(EngineUnavailableError("gone", "engine_died"))
        assert [o.token_ids for o in await stream.take()] == [[1]]
        with pytest.raises(EngineUnavailableError, match="gone"):
            await stream.take()
    with pytest.raises(EngineUnavailableError, match="not ready"):
        async with client.submit([submit("b")]):
            pass


async def test_a_rejection_reaches_its_request_and_ends_its_siblings(client: EngineClient, sent: list[Command]) -> None:
    """One rejected sequence is the whole request's error; the others of it are aborted."""
    async with client.submit([submit("a"), submit("b")]) as stream:
        client.dispatch(Rejected(request_id="b", code="overloaded", message="full"))
        with pytest.raises(EngineRejectedError):
            await stream.take()
    assert sent[2:] == [Abort("a")]


async def test_everybody_who_waits_is_told(client: EngineClient) -> None:
    """A death wakes all waiting requests."""

    async def wait(request_id: str) -> str:
        try:
            async with client.submit([submit(request_id)]) as stream:
                await stream.take()
        except EngineUnavailableError as error:
            return error.code
        return "served"

    waiting = [asyncio.create_task(wait(f"{i}")) for i in range(3)]
    await asyncio.sleep(0)
    client.detach(EngineUnavailableError("gone", "engine_died"))
    assert await asyncio.gather(*waiting) == ["engine_died"] * 3
