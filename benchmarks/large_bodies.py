"""Bodies of the largest size that is accepted, many at once: what small requests notice, and the front's memory.

python -m benchmarks.large_bodies [--bodies 12] [--rounds 5] [--kinds spaces,words] [--json OUT]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp
import msgspec

from benchmarks import termination
from benchmarks.forerun_service import serve_command
from benchmarks.idle import memory_mb
from benchmarks.machine import Machine, describe_machine
from benchmarks.server_process import serving

LIVE_PAUSE_SECONDS = 0.005
SMALL_PAUSE_SECONDS = 0.02
QUIET_SECONDS = 10.0
REST_SECONDS = 4.0
STORM_SECONDS = 5.0
"""Shortest storm: rounds are repeated until then, for enough probes."""
PROMPT_LIMIT_BYTES = 600_000
"""Bytes of a text that the embedded model's context (8,192 tokens of at most 81 bytes) does not rule out."""

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
Make = Callable[[int], tuple[str, bytes]]
"""Route and body of about so many bytes."""


def _text(unit: str) -> Make:
    return lambda size: (TEXT, json.dumps({"prompt": unit * (min(size, PROMPT_LIMIT_BYTES) // len(unit))}).encode())


def _messages(size: int) -> tuple[str, bytes]:
    message = {"role": "user", "content": ""}
    return CHAT, json.dumps({"messages": [message] * ((size - 64) // (len(json.dumps(message)) + 2))}).encode()


def _prediction(size: int) -> tuple[str, bytes]:
    content = "a1" * (min(size, PROMPT_LIMIT_BYTES) // 2)
    return TEXT, json.dumps({"prompt": "Hi", "prediction": {"type": "content", "content": content}}).encode()


def _texts(size: int) -> tuple[str, bytes]:
    return TEXT, json.dumps({"prompt": ["a"] * ((size - 64) // 5)}).encode()


def _id_lists(size: int) -> tuple[str, bytes]:
    return TEXT, json.dumps({"prompt": [[1]] * ((size - 64) // 5)}, separators=(",", ":")).encode()


KINDS: dict[str, Make] = {
    "spaces": _text(" "),
    "words": _text("The quick brown fox jumps over the lazy dog. "),
    "letters": _text("x1"),
    "control": _text("<|im_end|>"),
    "messages": _messages,
    "prediction": _prediction,
    "texts": _texts,
    "id_lists": _id_lists,
    "malformed": lambda size: (TEXT, _id_lists(size)[1][:-1]),
}


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Latency of one kind of request, in seconds."""

    count: int
    median: float
    p99: float
    worst: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency:
        ordered = sorted(seconds)
        at = min(int(0.99 * len(ordered)), len(ordered) - 1)
        return cls(count=len(ordered), median=ordered[len(ordered) // 2], p99=ordered[at], worst=ordered[-1])


class Storm(msgspec.Struct, frozen=True, kw_only=True):
    """What happened while large bodies of one kind arrived."""

    kind: str
    body_bytes: int
    statuses: dict[str, int]
    seconds: float
    """Duration of a round, from the first body sent to the last answered."""
    live: Latency
    small: Latency
    peak_mb: float
    memory_mb: float
    """Memory of the front some seconds afterwards."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A service at rest, and in each storm."""

    max_body_bytes: int
    quiet_live: Latency
    quiet_small: Latency
    memory_mb: float
    storms: list[Storm]
    machine: Machine


class Probes:
    """Small requests all the time: /health/live, and completions of one token."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self.live: list[float] = []
        self.small: list[float] = []

    async def run(self) -> None:
        await asyncio.gather(self._ask_live(), self._ask_small())

    async def _ask_live(self) -> None:
        while True:
            began = time.perf_counter()
            async with self._session.get(f"{self._url}/health/live") as response:
                await response.read()
            self.live.append(time.perf_counter() - began)
            await asyncio.sleep(LIVE_PAUSE_SECONDS)

    async def _ask_small(self) -> None:
        body = {"prompt": "Hi", "max_tokens": 1}
        while True:
            began = time.perf_counter()
            async with self._session.post(f"{self._url}{TEXT}", json=body) as response:
                await response.read()
            self.small.append(time.perf_counter() - began)
            await asyncio.sleep(SMALL_PAUSE_SECONDS)


async def during(probes: Probes, work: Callable[[], asyncio.Future[object]]) -> None:
    """Probe as long as `work` takes."""
    probing = asyncio.create_task(probes.run())
    try:
        await work()
        if probing.done():
            probing.result()
    finally:
        probing.cancel()
        await asyncio.gather(probing, return_exceptions=True)


async def measure(num_bodies: int, rounds: int, kinds: Sequence[str], flags: Sequence[str]) -> Report:
    """Start a service, probe it at rest and in a storm of each kind."""
    async with (
        serving(serve_command(flags), "/health/ready") as server,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as heavy,
    ):
        most = await largest_body(heavy, server.url)
        await warm_up(session, server.url)
        quiet = Probes(session, server.url)
        await during(quiet, lambda: asyncio.ensure_future(asyncio.sleep(QUIET_SECONDS)))
        quiet_mb = memory_mb(server.pid)
        storms = []
        for kind in kinds:
            path, body = KINDS[kind](most)
            probes, peaks = Probes(session, server.url), [0.0]
            statuses: Counter[str] = Counter()

            async def send(url: str, data: bytes, counts: Counter[str]) -> None:
                async with heavy.post(url, data=data) as response:
                    await response.read()
                    counts[str(response.status)] += 1

            async def storm(url: str, data: bytes, counts: Counter[str], peaks: list[float]) -> None:
                began = time.perf_counter()
                while len(peaks) <= rounds or time.perf_counter() < began + STORM_SECONDS:
                    await asyncio.gather(*(send(url, data, counts) for _ in range(num_bodies)))
                    peaks.append(memory_mb(server.pid))

            began = time.perf_counter()
            work = storm(server.url + path, body, statuses, peaks)
            await during(probes, lambda work=work: asyncio.ensure_future(work))  # type: ignore[misc]
            seconds = (time.perf_counter() - began) / (len(peaks) - 1)
            await asyncio.sleep(REST_SECONDS)
            storms.append(
                Storm(
                    kind=kind,
                    body_bytes=len(body),
                    statuses=dict(statuses),
                    seconds=seconds,
                    live=Latency.of(probes.live),
                    small=Latency.of(probes.small),
                    peak_mb=max(peaks),
                    memory_mb=memory_mb(server.pid),
                )
            )
    return Report(
        max_body_bytes=most,
        quiet_live=Latency.of(quiet.live),
        quiet_small=Latency.of(quiet.small),
        memory_mb=quiet_mb,
        storms=storms,
        machine=describe_machine(),
    )


async def largest_body(session: aiohttp.ClientSession, url: str) -> int:
    """The limit of a body, as the error of one that is over it says."""
    async with session.post(f"{url}{TEXT}", data=b" " * (64 * 1024**2)) as response:
        message = (await response.json())["error"]["message"]
    return int(message.rpartition(" of ")[2].split()[0])


async def warm_up(session: aiohttp.ClientSession, url: str) -> None:
    """One request, so that nothing is done for the first time while it is measured."""
    async with session.post(f"{url}{TEXT}", json={"prompt": "Hi", "max_tokens": 1}) as response:
        await response.read()


def main() -> int:
    """Measure, print, write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.large_bodies", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--bodies", type=int, default=12, help="bodies at once (default: 12)")
    parser.add_argument("--rounds", type=int, default=5, help="how often at least, one after the other (default: 5)")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)} (default: all)")
    parser.add_argument("--forerun-args", default="", metavar="FLAGS", help="flags of the service")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the report there")
    arguments = parser.parse_args()
    kinds = arguments.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"--kinds: {', '.join(sorted(unknown))} is unknown; known are {', '.join(KINDS)}")
    try:
        flags = shlex.split(arguments.forerun_args)
        report = termination.run(measure(arguments.bodies, arguments.rounds, kinds, flags))
    except (OSError, RuntimeError) as error:
        print(f"benchmarks.large_bodies: {error}", file=sys.stderr)
        return 2
    print(f"largest body {report.max_body_bytes} bytes; times in ms, memory of the front in MB")
    print(f"{'':11} {'live p50':>9} {'p99':>7} {'worst':>7} {'small p50':>10} {'p99':>7} {'worst':>7} {'memory':>7}")
    print(_row("quiet", report.quiet_live, report.quiet_small, f"{report.memory_mb:7.0f}"))
    for storm in report.storms:
        rest = f"{storm.memory_mb:7.0f}  peak {storm.peak_mb:.0f}, {storm.seconds:.2f} s a round, {storm.statuses}"
        print(_row(storm.kind, storm.live, storm.small, rest))
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    return 0


def _row(name: str, live: Latency, small: Latency, rest: str) -> str:
    live_ms, small_ms = ([1000 * value for value in (one.median, one.p99, one.worst)] for one in (live, small))
    return (
        f"{name:11} {live_ms[0]:9.1f} {live_ms[1]:7.1f} {live_ms[2]:7.1f} "
        f"{small_ms[0]:10.1f} {small_ms[1]:7.1f} {small_ms[2]:7.1f} {rest}"
    )


if __name__ == "__main__":
    sys.exit(main())
