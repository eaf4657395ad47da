"""No memory left: for an engine, which the kernel ends, and for a front."""

from __future__ import annotations

import asyncio
import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.server import Server
from tests.e2e.test_pool_failover import until_serving
from tests.tiny_folder import write_tiny_folder

CGROUPS = Path("/sys/fs/cgroup")
PROMPT = {"prompt": [5, 6, 7, 8], "max_tokens": 40, "ignore_eos": True, "temperature": 0, "return_token_ids": True}


class MemoryLimit:
    """A control group whose processes get no further memory once `limit` bytes are theirs."""

    def __init__(self, limit: int) -> None:
        """Raises OSError where it may not be made."""
        has_own_tree = (CGROUPS / "memory").is_dir()
        self._folder = (CGROUPS / "memory" if has_own_tree else CGROUPS) / f"forerun-{secrets.token_hex(4)}"
        self._folder.mkdir()
        try:
            (self._folder / ("memory.limit_in_bytes" if has_own_tree else "memory.max")).write_text(str(limit))
        except OSError:
            self.close()
            raise

    def take(self, pid: int) -> None:
        """Move a process in. What it has already is not counted."""
        (self._folder / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        """Take it away, when its last process is gone."""
        deadline = time.monotonic() + 10
        while (self._folder / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        self._folder.rmdir()


@pytest.fixture
def limit() -> Iterator[MemoryLimit]:
    """Room for nothing more. With a little room the kernel would first take the pages of programs, again and again."""
    try:
        made = MemoryLimit(0)
    except OSError as error:
        pytest.skip(f"no control group with a memory limit can be made here: {error}")
    yield made
    with suppress(OSError):
        made.close()


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Server]:
    """A service with two engines of a tiny model."""
    folder = write_tiny_folder(tmp_path / "model")
    flags = ["--model", str(folder), "--device", "cpu", "--engines", "2", "--num-blocks", "2048"]
    with Server(tmp_path / "log", *flags) as server:
        yield server


async def answers(client: aiohttp.ClientSession, server: Server, number: int) -> list[tuple[int, object]]:
    """Status and tokens of so many requests at a time."""

    async def ask() -> tuple[int, object]:
        async with client.post(f"{server.url}/v1/completions", json=PROMPT) as response:
            answer = await response.json()
            return response.status, answer["choices"][0]["token_ids"] if response.status == 200 else answer

    return await asyncio.gather(*(ask() for _ in range(number)))


@pytest.mark.slow
async def test_an_engine_without_memory_is_replaced(tiny: Server, limit: MemoryLimit) -> None:
    """The kernel kills it: all requests are answered with the same tokens, the log says so, and another takes over."""
    async with aiohttp.ClientSession() as client:
        await until_serving(client, tiny, 2)
        (wanted,) = await answers(client, tiny, 1)
        victim = tiny.engine_pids()[0]
        limit.take(victim)
        while victim in tiny.engine_pids():
            assert await answers(client, tiny, 20) == [wanted] * 20
        await until_serving(client, tiny, 2)
        assert await answers(client, tiny, 4) == [wanted] * 4
    assert "its process was ended by SIGKILL" in tiny.log()


@pytest.mark.slow
async def test_a_front_without_memory_takes_its_engines_along(tiny: Server, limit: MemoryLimit) -> None:
    """The kernel kills it, and no engine is left behind."""
    async with aiohttp.ClientSession() as client:
        await until_serving(client, tiny, 2)
        pids = tiny.engine_pids()
        limit.take(tiny.process.pid)
        body = {**PROMPT, "prompt": [5] * 200_000}
        while tiny.process.poll() is None:
            with suppress(aiohttp.ClientError):
                async with client.post(f"{tiny.url}/v1/completions", json=body) as response:
                    await response.read()
    assert tiny.process.wait() == -signal.SIGKILL
    deadline = time.monotonic() + 20
    while remaining := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, remaining
        await asyncio.sleep(0.05)


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
