"""Experiments on real processes: one with the embedded model, and fronts that share a Redis and are killed."""

from __future__ import annotations

import asyncio
import json
import signal
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from service.experiments.commands import experiment_command, report_command
from tests.e2e.server import Server
from tests.redis_server import RedisServer
from tests.service.conftest import byte_level_tokenizer, write_folder

ARMS = [
    {"name": "plain", "speculation": {"method": "none"}},
    {"name": "ngram", "speculation": {"method": "ngram", "num_speculative_tokens": 4}},
]
TEXT = "The rain in Spain stays mainly in the plain. The rain in Spain"
StartFront = Callable[[], Server]


@pytest.fixture
def start_front(tmp_path: Path, shared_redis: RedisServer) -> Iterator[StartFront]:
    """Starts fronts with scripted engines that share a store."""
    folder = write_folder(tmp_path / "model", byte_level_tokenizer())
    flags = ["--model", str(folder), "--store", shared_redis.url, "--namespace", uuid.uuid4().hex]
    with ExitStack() as stack:

        def start() -> Server:
            log = tmp_path / f"log-{uuid.uuid4().hex}"
            return stack.enter_context(Server(log, *flags, module="tests.e2e.scripted_front"))

        yield start


async def call(method: str, url: str, body: object = None) -> Any:
    """The JSON of an answer that is no error."""
    async with aiohttp.ClientSession() as client, client.request(method, url, json=body) as response:
        text = await response.text()
        assert response.status < 400, text
        return json.loads(text) if text else None


async def complete(server: Server, number: int = 8, **changes: Any) -> list[str]:
    """So many requests at a time; the arms they were given."""

    async def one(client: aiohttp.ClientSession, index: int) -> str:
        body = {"prompt": TEXT, "max_tokens": 6, "seed": index, "ignore_eos": True, **changes}
        async with client.post(f"{server.url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            await response.read()
            return response.headers.get("X-Forerun-Arm", "")

    async with aiohttp.ClientSession() as client:
        return list(await asyncio.gather(*(one(client, index) for index in range(number))))


async def num_finished(server: Server) -> dict[str, int]:
    seen = await call("GET", f"{server.url}/v1/experiments/shared")
    return {arm["name"]: arm["finished"] for arm in seen["report"]["arms"]}


async def eventually(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.1)


async def test_on_the_embedded_model(server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Arms give the same text, the report counts each request, the command line shows it, stopping ends it."""
    definition = {"name": "embedded", "arms": ARMS, "unit": "user", "min_samples": 40}
    await call("POST", f"{server.url}/v1/experiments", definition)
    texts: dict[str, set[str]] = {"plain": set(), "ngram": set()}
    async with aiohttp.ClientSession() as client:
        for number in range(12):
            body = {"prompt": TEXT, "max_tokens": 8, "temperature": 0.7, "seed": 3, "user": f"user-{number}"}
            async with client.post(f"{server.url}/v1/completions", json=body) as response:
                answer = await response.json()
                texts[response.headers["X-Forerun-Arm"]].add(answer["choices"][0]["text"])
    assert len(texts["plain"] | texts["ngram"]) == 1
    seen = await call("GET", f"{server.url}/v1/experiments/embedded")
    assert sum(arm["finished"] for arm in seen["report"]["arms"]) == 12
    assert seen["report"]["decision"] == "collecting"
    lines: list[str] = []

    def commands() -> None:
        assert experiment_command(["--url", server.url, "list"], lines.append) == 0
        assert experiment_command(["--url", server.url, "stop", "embedded"], lines.append) == 0
        out = ["--url", server.url, "embedded", "--html", str(tmp_path / "report.html")]
        assert report_command(out, lines.append) == 0

    await asyncio.to_thread(commands)
    assert any("embedded" in line and "running" in line for line in lines)
    assert "<html" in (tmp_path / "report.html").read_text()
    assert await complete(server, 1, user="user-0") == [""]


async def test_the_audit_finds_nothing_on_the_embedded_model(tmp_path: Path, server: Server) -> None:
    """Greedy and sampled requests that used speculation, run again without it, have the same tokens."""
    flags = ["--num-blocks", "64", "--max-model-len", "512", "--audit-share", "1"]
    with Server(tmp_path / "log", *flags) as audited:
        for temperature in (0, 0.9):
            speculation = {"method": "ngram", "num_speculative_tokens": 4}
            await complete(audited, 3, speculation=speculation, temperature=temperature, max_tokens=12)

        async def is_done() -> bool:
            return bool((await call("GET", f"{audited.url}/v1/audit"))["audited"] == 6)

        await eventually(is_done, 60.0)
        report = await call("GET", f"{audited.url}/v1/audit")
        assert (report["diverged"], report["divergences"], report["dropped"]) == (0, [], 0)


async def test_two_fronts_are_one_experiment(start_front: StartFront) -> None:
    """What one creates the other runs, units keep their arm on both, and both report the same numbers."""
    first, second = start_front(), start_front()
    definition = {"name": "shared", "arms": ARMS, "unit": "user"}
    await call("POST", f"{first.url}/v1/experiments", definition)

    async def knows() -> bool:
        return (await complete(second, 1, user="somebody")) != [""]

    await eventually(knows)
    for number in range(20):
        one, other = [await complete(front, 1, user=f"user-{number}") for front in (first, second)]
        assert one == other

    async def they_agree() -> bool:
        counts = [await num_finished(front) for front in (first, second)]
        return counts[0] == counts[1] and sum(counts[0].values()) == 1 + 2 * 20

    await eventually(they_agree)
    await call("POST", f"{second.url}/v1/experiments/shared/stop")

    async def has_stopped() -> bool:
        return await complete(first, 1, user="user-0") == [""]

    await eventually(has_stopped)


async def test_a_killed_front_loses_only_its_last_moment(start_front: StartFront) -> None:
    """What it had handed over is in the other's report; a front that starts later has the profiles and the numbers."""
    first, second = start_front(), start_front()
    await call("PUT", f"{first.url}/v1/speculation/kept", {"speculation": ARMS[1]["speculation"], "default": True})
    await call("POST", f"{first.url}/v1/experiments", {"name": "shared", "arms": ARMS})
    assert "" not in await complete(first, 30)

    async def handed_over() -> bool:
        return sum((await num_finished(second)).values()) == 30

    await eventually(handed_over)
    assert "" not in await complete(first, 10)
    first.stop(signal.SIGKILL)
    left = sum((await num_finished(second)).values())
    assert 30 <= left <= 40
    assert "" not in await complete(second, 5)
    third = start_front()
    profiles = await call("GET", f"{third.url}/v1/speculation")
    assert profiles["default"] == "kept"
    assert "" not in await complete(third, 5)

    async def they_agree() -> bool:
        counts = [await num_finished(front) for front in (second, third)]
        return counts[0] == counts[1] and sum(counts[0].values()) == left + 10

    await eventually(they_agree)
