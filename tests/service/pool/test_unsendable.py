"""Sequences that cannot be sent, or whose handling raises: each ends alone, and none is counted."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence

import msgspec
import pytest
from structlog.testing import capture_logs

from service.engine_client import EngineRejectedError, EngineUnavailableError, OutputStream
from service.pool.member import Member
from service.pool.routing import Quote, RoundRobin
from speculation.framing import encode_frame
from speculation.messages import Abort, Command, SamplingParams, Stats, Submit
from tests.service.conftest import StartService
from tests.service.pool.conftest import READY, Engine, Pool, make_pool, output, submit

TOO_LARGE = msgspec.structs.replace(submit("large"), sampling=SamplingParams(seed=2**64))
HALF_A_CHARACTER = msgspec.structs.replace(submit("half"), cache_salt="\ud800")


def encode_all(engine: Engine) -> None:
    """Have an engine's commands encoded, as those of a real one are."""

    def send(command: Command) -> None:
        encode_frame(command)
        engine.sent.append(command)

    engine.member.attach(READY, send)


def is_empty(pool: Pool) -> bool:
    return not pool.pool.num_live and not pool.pool.num_waiting and not any(e.member.flights for e in pool.engines)


@pytest.mark.parametrize("bad", [TOO_LARGE, HALF_A_CHARACTER])
async def test_what_cannot_be_encoded_is_refused_and_not_counted(bad: Submit) -> None:
    """The request gets a refusal with the reason, its siblings are aborted, and nothing of it stays anywhere."""
    pool = make_pool(1)
    (engine,) = pool.engines
    encode_all(engine)
    with pytest.raises(EngineRejectedError, match="cannot be sent to an engine: a Submit cannot be encoded") as caught:
        async with pool.pool.submit([submit("first"), bad, submit("last")]):
            pass
    assert caught.value.rejected.code == "invalid"
    assert is_empty(pool)
    assert engine.sent == [engine.sent[0], Abort("first")]


class BrokenRouting(RoundRobin):
    """Chooses nothing."""

    def choose(self, quotes: Sequence[Quote]) -> Quote:
        raise RuntimeError("no route")


async def test_whatever_raises_while_a_stream_is_opened_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A routing, a look-up or a connection that raises, and a client that leaves meanwhile: no sequence is counted."""

    async def lookup_fails(hashes: Sequence[bytes], members: Sequence[Member]) -> Mapping[str, int]:
        raise RuntimeError("no look-up")

    async def lookup_hangs(hashes: Sequence[bytes], members: Sequence[Member]) -> Mapping[str, int]:
        await asyncio.sleep(60)
        raise AssertionError

    def send_fails(command: Command) -> None:
        raise RuntimeError("no connection")

    async def enter(pool: Pool) -> None:
        async with pool.pool.submit([submit("a"), submit("b")]):
            pass

    broken = make_pool(1, BrokenRouting())
    with pytest.raises(RuntimeError, match="no route"):
        await enter(broken)
    unlucky = make_pool(1)
    unlucky.engines[0].member.attach(READY, send_fails)
    with pytest.raises(RuntimeError, match="no connection"):
        await enter(unlucky)
    blind = make_pool(1)
    monkeypatch.setattr(blind.prefixes, "held", lookup_fails)
    with pytest.raises(RuntimeError, match="no look-up"):
        await enter(blind)
    left = make_pool(1)
    monkeypatch.setattr(left.prefixes, "held", lookup_hangs)
    entering = asyncio.create_task(enter(left))
    await asyncio.sleep(0.01)
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    assert all(map(is_empty, (broken, unlucky, blind, left)))


async def test_a_sequence_that_cannot_go_on_ends_alone() -> None:
    """When the only engine dies and comes back, a sequence that cannot be sent again gets its error, others go on."""
    pool = make_pool(1)
    (engine,) = pool.engines
    good = pool.pool.submit([submit("good", max_tokens=9)])
    bad = pool.pool.submit([TOO_LARGE])
    async with bad, good:  # this engine's `send` encodes nothing
        engine.die()
        assert pool.pool.num_waiting == 2
        with capture_logs() as logs:
            encode_all(engine)
        with pytest.raises(EngineRejectedError, match="cannot be encoded"):
            await bad.take()
        assert [command.request_id for command in engine.submitted][-1] == "good"
        engine.say(output("good", 1, finish="length"))
        assert [each.token_ids for each in await good.take()] == [[1]]
    assert [entry["sequence"] for entry in logs if entry["log_level"] == "error"] == ["large"]
    assert is_empty(pool)


async def test_an_error_while_an_output_is_delivered_ends_that_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client gets an error and its engine an abort; outputs behind it in the same message arrive."""
    pool = make_pool(1)
    (engine,) = pool.engines
    one, two = pool.pool.submit([submit("a")]), pool.pool.submit([submit("b")])
    async with one, two:
        monkeypatch.setattr(one, "put", None)
        engine.say(output("a", 1), output("b", 2, finish="length"))
        with pytest.raises(EngineUnavailableError, match="error in the service"):
            await one.take()
        assert [each.token_ids for each in await two.take()] == [[2]]
        assert engine.sent[-1] == Abort("a")
    assert is_empty(pool)


async def test_an_event_that_cannot_be_handled_is_logged_by_name() -> None:
    """Numbers of an engine that do not add up are an error in the log, not the end of who listens to it."""
    pool = make_pool(2)
    stats = msgspec.structs.replace(msgspec.convert(STATS, Stats), counters={"steps": None})
    with capture_logs() as logs:
        for engine in pool.engines:
            engine.member.dispatch(stats)
    assert {(entry["engine"], entry["event_type"]) for entry in logs} <= {("engine-0", "Stats"), ("engine-1", "Stats")}
    assert logs


STATS = {
    "type": "stats",
    "num_waiting": 0,
    "num_running": 0,
    "blocks_free": 1,
    "blocks_cached": 0,
    "blocks_in_use": 0,
    "counters": {},
    "accepted_per_position": [],
    "drafted_per_position": [],
    "skipped_drafts": {},
    "step_seconds_buckets": [0] * 11,
    "step_seconds_sum": 0.0,
}


async def test_a_service_outlives_what_cannot_be_sent(start_service: StartService) -> None:
    """Requests that cannot be sent, one that no longer can, and the death of the only engine: it serves on."""
    service = await start_service()
    pool = service.front.client
    for _ in range(3):
        body = {"prompt": "Hi", "max_tokens": 1, "top_k": 2**64}
        status, answer = await service.post("/v1/completions", body)
        assert status == 400, answer
        with pytest.raises(EngineRejectedError):
            async with pool.submit([TOO_LARGE]):
                pass
    assert pool.num_live == 0
    assert (await service.post("/v1/completions", {"prompt": "Hi", "max_tokens": 2}))[0] == 200
    async with pool.submit([submit("long", max_tokens=100_000, ignore_eos=True, salt="slow")]) as stream:
        await stream.take()
        pool._flights["long"].submit = msgspec.structs.replace(TOO_LARGE, request_id="long")
        assert service.supervisor.pid is not None
        os.kill(service.supervisor.pid, signal.SIGKILL)
        with pytest.raises(EngineRejectedError):
            await take_all(stream)
    await service.until(lambda: service.front.is_ready)
    assert pool.num_live == 0
    assert (await service.post("/v1/completions", {"prompt": "Hi", "max_tokens": 2}))[0] == 200


async def take_all(stream: OutputStream) -> None:
    while not stream.is_finished:
        await stream.take()


async def test_a_supervisor_outlives_errors_of_the_service(
    start_service: StartService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception that is no engine's death, and a process that cannot be started: the engine is started again."""
    service = await start_service()
    first = service.supervisor.pid
    failures = [RuntimeError("a mistake"), OSError(24, "Too many open files")]
    member = next(iter(service.front.client.members.values()))
    load, dispatch = service.supervisor._on_ready, member.dispatch

    async def fail_to_load(ready: object) -> None:
        if failures:
            raise failures.pop()
        await load(ready)  # type: ignore[arg-type]

    def fail_to_dispatch(event: object) -> None:
        monkeypatch.setattr(member, "dispatch", dispatch)
        raise RuntimeError("a mistake")

    monkeypatch.setattr(service.supervisor, "_on_ready", fail_to_load)
    monkeypatch.setattr(member, "dispatch", fail_to_dispatch)
    await service.until(lambda: service.supervisor.pid not in {first, None} and service.front.is_ready)
    assert failures == []
    assert (await service.post("/v1/completions", {"prompt": "Hi", "max_tokens": 2}))[0] == 200
