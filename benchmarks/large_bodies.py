"""Bodies of the largest size that is accepted, many at once: what small requests notice, and the front's memory.

    python -m benchmarks.large_bodies [--bodies 12] [--rounds 10] [--kinds spaces,words] [--json OUT]

The bodies are sent by a thread that makes way for everything else: clients elsewhere do not take this machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp
import msgspec

from benchmarks import termination
from benchmarks.forerun_service import serve_command
from benchmarks.idle import memory_mb
from benchmarks.machine import Machine, describe_machine
from benchmarks.probe import Timed, probing
from benchmarks.server_process import Server, serving

QUIET_SECONDS = 1.0
"""Time before each storm in which nothing but probes is sent."""
PAUSE_SECONDS = 0.5
"""Time after each storm that counts for neither."""
REST_SECONDS = 4.0
SENDER_NICE = 15
Span = tuple[float, float]
"""Start and end, by `time.monotonic`."""
PROMPT_LIMIT_BYTES = 600_000
"""Bytes of a text that the embedded model's context (8,192 tokens of at most 81 bytes) does not rule out."""

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
Make = Callable[[int], tuple[str, bytes]]
"""A function of a size in bytes: route, and a body of about that size."""


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
    """Mean duration of a storm, from the first body sent to the last answered."""
    quiet_live: Latency
    """Latencies between the storms."""
    quiet_small: Latency
    live: Latency
    """Latencies of requests that were under way during a storm."""
    small: Latency
    peak_mb: float
    memory_mb: float
    """Memory of the front some seconds afterwards."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A service in storms of large bodies."""

    max_body_bytes: int
    memory_mb: float
    """Memory of the front before the first storm."""
    storms: list[Storm]
    machine: Machine


async def measure(num_bodies: int, rounds: int, kinds: Sequence[str], flags: Sequence[str]) -> Report:
    """Start a service, and probe it at rest and in storms of each kind, in turns."""
    async with (
        serving(serve_command(flags), "/health/ready") as server,
        aiohttp.ClientSession() as session,
    ):
        most = await largest_body(session, server.url)
        await warm_up(session, server.url)
        memory_before = memory_mb(server.pid)
        storms = [await measure_kind(kind, most, num_bodies, rounds, server) for kind in kinds]
    return Report(max_body_bytes=most, memory_mb=memory_before, storms=storms, machine=describe_machine())


async def measure_kind(kind: str, most: int, num_bodies: int, rounds: int, server: Server) -> Storm:
    """Let `num_bodies` arrive at once, again and again, with a rest as long before each time."""
    path, body = KINDS[kind](most)
    statuses: Counter[str] = Counter()
    peak = 0.0
    quiet_spans: list[Span] = []
    storm_spans: list[Span] = []
    loop = asyncio.get_running_loop()

    def storm() -> list[int]:
        return asyncio.run(send(server.url + path, body, num_bodies))

    with ThreadPoolExecutor(1, initializer=make_way) as sender:
        async with probing(server.url) as probes:
            await asyncio.sleep(REST_SECONDS)
            for _ in range(rounds):
                began = time.monotonic()
                await asyncio.sleep(QUIET_SECONDS)
                sent = time.monotonic()
                statuses.update(map(str, await loop.run_in_executor(sender, storm)))
                ended = time.monotonic()
                quiet_spans.append((began, sent))
                storm_spans.append((sent, ended))
                peak = max(peak, memory_mb(server.pid))
                await asyncio.sleep(PAUSE_SECONDS)
    await asyncio.sleep(REST_SECONDS)
    return Storm(
        kind=kind,
        body_bytes=len(body),
        statuses=dict(statuses),
        seconds=sum(end - start for start, end in storm_spans) / rounds,
        quiet_live=Latency.of(within(probes.live, quiet_spans)),
        quiet_small=Latency.of(within(probes.small, quiet_spans)),
        live=Latency.of(within(probes.live, storm_spans)),
        small=Latency.of(within(probes.small, storm_spans)),
        peak_mb=peak,
        memory_mb=memory_mb(server.pid),
    )


def make_way() -> None:
    """Lower the priority of this thread alone."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), SENDER_NICE)


async def send(url: str, body: bytes, count: int) -> list[int]:
    """Send a body `count` times at once. Returns the statuses."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one() -> int:
            async with session.post(url, data=body) as response:
                await response.read()
                return response.status

        return await asyncio.gather(*(one() for _ in range(count)))


def within(timed: Timed, spans: Sequence[Span]) -> list[float]:
    """Durations of the requests that were under way at some moment of a span."""
    return [seconds for sent, seconds in timed if any(sent < end and sent + seconds > start for start, end in spans)]


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
    parser.add_argument("--rounds", type=int, default=10, help="storms of each kind (default: 10)")
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
    print(f"largest body {report.max_body_bytes} bytes; front {report.memory_mb:.0f} MB; p99 in ms, quiet -> storm")
    for storm in report.storms:
        print(
            f"{storm.kind:11} live {_change(storm.quiet_live, storm.live)}  small "
            f"{_change(storm.quiet_small, storm.small)}  peak {storm.peak_mb:.0f}, after {storm.memory_mb:.0f} MB; "
            f"{storm.seconds:.2f} s, {storm.body_bytes} bytes, {storm.statuses}"
        )
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    return 0


def _change(quiet: Latency, storm: Latency) -> str:
    return f"{1000 * quiet.p99:6.1f} -> {1000 * storm.p99:6.1f} ({storm.p99 / quiet.p99:4.2f} x, n {storm.count})"


if __name__ == "__main__":
    sys.exit(main())
