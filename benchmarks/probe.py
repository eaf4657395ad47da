"""Small requests to a service, all the time, from a process of their own: `python -m benchmarks.probe URL`.

Asks until its standard input is closed, then prints one JSON object: for `live` (GET /health/live) and `small` (a
completion of one token) a list of pairs, the moment a request was sent, by `time.monotonic`, which all processes of a
machine share, and the seconds until it was answered.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp

LIVE_PAUSE_SECONDS = 0.01
SMALL_PAUSE_SECONDS = 0.02
SMALL = {"prompt": "Hi", "max_tokens": 1}

Timed = list[tuple[float, float]]
"""Moments and durations."""


@dataclass
class Probes:
    """What was measured; empty until the probing process has ended."""

    live: Timed = field(default_factory=list)
    small: Timed = field(default_factory=list)


@asynccontextmanager
async def probing(url: str) -> AsyncIterator[Probes]:
    """Probe a service from another process for as long as the context is open."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.probe",
        url,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 26,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    found = Probes()
    try:
        await process.stdout.readline()  # it has begun
        yield found
    finally:
        process.stdin.close()
        output = await process.stdout.read()
        await process.wait()
    measured = json.loads(output)
    found.live, found.small = measured["live"], measured["small"]


async def probe(url: str) -> Probes:
    """Ask until the standard input is closed."""
    found = Probes()
    closed = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, closed.set)
    timeout = aiohttp.ClientTimeout(total=120.0)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def ask_live() -> None:
            while not closed.is_set():
                began = time.monotonic()
                async with session.get(f"{url}/health/live") as response:
                    await response.read()
                found.live.append((began, time.monotonic() - began))
                await asyncio.sleep(LIVE_PAUSE_SECONDS)

        async def ask_small() -> None:
            while not closed.is_set():
                began = time.monotonic()
                async with session.post(f"{url}/v1/completions", json=SMALL) as response:
                    await response.read()
                found.small.append((began, time.monotonic() - began))
                await asyncio.sleep(SMALL_PAUSE_SECONDS)

        print("probing", flush=True)
        await asyncio.gather(ask_live(), ask_small())
    return found


if __name__ == "__main__":
    result = asyncio.run(probe(sys.argv[1]))
    print(json.dumps({"live": result.live, "small": result.small}))
