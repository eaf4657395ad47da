"""A front and its engines whose machine's clock is set by an hour, to and fro, in mid-stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.server import Server
from tests.e2e.test_out_of_memory import PROMPT
from tests.e2e.test_pool_failover import until_serving
from tests.fake_clock import FakeClock, find_library
from tests.redis_server import RedisServer
from tests.tiny_folder import write_tiny_folder

pytestmark = pytest.mark.skipif(find_library() is None, reason="libfaketime is not installed: apt-get install faketime")

HOUR = 3600


@pytest.mark.slow
async def test_steps_of_the_clock_change_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_redis: Callable[..., RedisServer]
) -> None:
    """Every stream brings the same tokens, no engine or store is given up, and no measured time is an hour."""
    redis = start_redis()
    clock = FakeClock(tmp_path / "offset")
    for name, value in clock.environment.items():
        monkeypatch.setenv(name, value)
    folder = write_tiny_folder(tmp_path / "model")
    flags = ["--model", str(folder), "--device", "cpu", "--num-blocks", "1024", "--store", redis.url]
    with Server(tmp_path / "log", *flags, "--store-timeout", "2") as server:
        for name in clock.environment:
            monkeypatch.delenv(name)
        async with aiohttp.ClientSession() as client:

            async def ask() -> tuple[int, list[int]]:
                """When the service says it was answered, and the tokens."""
                async with client.post(f"{server.url}/v1/completions", json=PROMPT) as response:
                    assert response.status == 200, await response.text()
                    answer = await response.json()
                return answer["created"], answer["choices"][0]["token_ids"]

            await until_serving(client, server, 1)
            begun, wanted = await ask()
            for offset in (HOUR, 0, -HOUR, 0):
                asking = [asyncio.create_task(ask()) for _ in range(4)]
                await asyncio.sleep(0.02)
                clock.step(offset)
                assert [token_ids for _, token_ids in await asyncio.gather(*asking)] == [wanted] * 4
                created, token_ids = await ask()
                assert created - begun == pytest.approx(offset, abs=300)
                assert token_ids == wanted
                await asyncio.sleep(1.5)
        assert server.metric("forerun_engine_restarts_total") == 0
        assert server.metric("forerun_store_up") == 1
    lines = [json.loads(line) for line in server.log().splitlines()]
    assert not [line["event"] for line in lines if line["level"] in {"warning", "error"}]
    assert all(0 <= line["seconds"] < 300 for line in lines if line["event"] == "request")
    assert all(0 <= line["ttft"] < 300 for line in lines if line["event"] == "generation")
