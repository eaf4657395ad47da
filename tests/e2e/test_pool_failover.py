"""Streams that outlive their engine, on the embedded model: killed, stopped, and killed again under load."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from target.embedded import embedded_model_dir
from target.errors import CheckpointError
from tests.e2e.server import Server

PROMPTS = ["Once upon a time", "The list: 1, 2, 3, 4, 5,", "def main():\n    ", "The capital of France is"]


def body(number: int, **changes: Any) -> dict[str, Any]:
    """One of many requests, greedy or sampled, with and without penalties; the same number is the same request."""
    return {
        "prompt": PROMPTS[number % len(PROMPTS)],
        "seed": number,
        "temperature": 0.9 if number % 3 else 0,
        "presence_penalty": 0.5 if number % 2 else 0,
        "max_tokens": 24 + number % 7,
        "logprobs": 1,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        # Lookup in finished answers would be done in a few steps the second time.
        "speculation": "ngram",
        **changes,
    }


async def ask(client: aiohttp.ClientSession, server: Server, request: dict[str, Any]) -> dict[str, Any]:
    """A streamed answer put together: all that does not depend on which engine gave it."""
    async with client.post(f"{server.url}/v1/completions", json=request) as response:
        assert response.status == 200, await response.text()
        return summary((await response.text()).split("\n\n"))


def summary(blocks: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"text": "", "token_ids": [], "logprobs": [], "finish_reason": None}
    for block in blocks:
        if not block.startswith("data: ") or block == "data: [DONE]":
            continue
        event = json.loads(block.removeprefix("data: "))
        assert "error" not in event, event
        for choice in event["choices"]:
            found["text"] += choice["text"]
            found["token_ids"] += choice["token_ids"]
            found["logprobs"] += choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
            found["finish_reason"] = choice["finish_reason"] or found["finish_reason"]
        if event.get("usage"):
            found["usage"] = (event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"])
    return found


@pytest.fixture
def pool(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    """A service with two engines, for one test to hurt; its parameters are further flags."""
    try:
        embedded_model_dir()
    except CheckpointError:
        pytest.skip("the embedded model is not fetched; `forerun fetch` fetches it")
    flags = ["--engines", "2", "--num-blocks", "256", "--silence-seconds", "3", "--check-invariants"]
    flags += getattr(request, "param", [])
    with Server(tmp_path / "log", *flags) as running:
        yield running


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_stream_goes_on_when_its_engine_dies_or_hangs(pool: Server, number: signal.Signals) -> None:
    """The answer, its logprobs and its usage are those of an undisturbed run, and afterwards nothing is left over."""
    request = body(5, max_tokens=400, ignore_eos=True)
    async with aiohttp.ClientSession() as client:
        await until_serving(client, pool, 2)
        undisturbed = await ask(client, pool, request)
        before = pool.engine_pids()
        ticks = [cpu_ticks(pid) for pid in before]
        async with client.post(f"{pool.url}/v1/completions", json=request) as response:
            blocks = [(await response.content.readuntil(b"\n\n")).decode() for _ in range(20)]
            os.kill(busiest(before, ticks), number)
            blocks += (await response.text()).split("\n\n")
        assert summary([block.strip() for block in blocks]) == undisturbed
        assert len(undisturbed["logprobs"]) == undisturbed["usage"][1] == 400
        await until_serving(client, pool, 2)
    assert len(pool.engine_pids()) == 2
    assert pool.engine_pids() != before
    assert pool.metric("forerun_pool_resumed_total") == 1
    pool.wait_until_idle()


@pytest.mark.slow
@pytest.mark.parametrize("pool", [["--max-num-batched-tokens", "32"]], indirect=True, ids=["small-steps"])
async def test_an_engine_killed_in_prefill(pool: Server) -> None:
    """Killed while it computes a long prompt, a few tokens a step: the answer is that of an undisturbed run."""
    words = " ".join(str(number) for number in range(500))
    request = body(1, prompt=words, max_tokens=200, ignore_eos=True)
    async with aiohttp.ClientSession() as client:
        await until_serving(client, pool, 2)
        undisturbed = await ask(client, pool, request)
        asking = asyncio.create_task(ask(client, pool, {**request, "cache_salt": "nothing cached"}))
        while not any(engine["sequences"] for engine in await engines_of(client, pool)):
            await asyncio.sleep(0.01)
        os.kill(busy(pool.engine_pids(), 0.02), signal.SIGKILL)
        assert not asking.done()
        assert await asking == undisturbed
        await until_serving(client, pool, 2)
    assert pool.metric("forerun_pool_resumed_total") == 1
    pool.wait_until_idle()


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_killing_under_load_changes_no_answer(pool: Server) -> None:
    """With an engine killed every few seconds under 50 streams, each answer equals the undisturbed one."""
    rng = random.Random(7)

    async def ask_all(client: aiohttp.ClientSession) -> list[list[dict[str, Any]]]:
        """50 streams at a time, four behind one another."""

        async def ask_some(number: int) -> list[dict[str, Any]]:
            requests = [body(number + 50 * turn, max_tokens=70, ignore_eos=True) for turn in range(4)]
            return [await ask(client, pool, request) for request in requests]

        return await asyncio.gather(*(ask_some(number) for number in range(50)))

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        await until_serving(client, pool, 2)
        undisturbed = await ask_all(client)
        asking = asyncio.create_task(ask_all(client))
        num_killed = 0
        while not asking.done():
            await asyncio.wait({asking}, timeout=rng.uniform(1.0, 3.0))
            pids = pool.engine_pids()
            if not asking.done() and len(pids) == 2:
                os.kill(rng.choice(pids), signal.SIGKILL)
                num_killed += 1
        assert await asking == undisturbed
        assert num_killed
        await until_serving(client, pool, 2)
    pool.wait_until_idle()
    assert len(pool.engine_pids()) == 2


def busy(pids: list[int], seconds: float) -> int:
    """The process that uses most of a processor, as soon as one has used any."""
    before = [cpu_ticks(pid) for pid in pids]
    while [cpu_ticks(pid) for pid in pids] == before:
        time.sleep(seconds)
    return busiest(pids, before)


def busiest(pids: list[int], before: list[int]) -> int:
    """The process that has used the most of a processor since each had used `before`."""
    used = [cpu_ticks(pid) - ticks for pid, ticks in zip(pids, before, strict=True)]
    return pids[used.index(max(used))]


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


async def until_serving(client: aiohttp.ClientSession, server: Server, num_engines: int) -> None:
    """Wait until so many engines serve."""
    async with asyncio.timeout(240):
        while sum(engine["state"] == "serving" for engine in await engines_of(client, server)) != num_engines:
            await asyncio.sleep(0.1)


async def engines_of(client: aiohttp.ClientSession, server: Server) -> list[dict[str, Any]]:
    """What the service says of its engines."""
    async with client.get(f"{server.url}/v1/engines") as response:
        return list((await response.json())["data"])
