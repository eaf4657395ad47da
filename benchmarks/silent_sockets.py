"""Sockets that say nothing against a service with few files: whether others are answered, and when all are closed.

    python -m benchmarks.silent_sockets [--sockets 5000] [--files 1024] [--kind silent] [--json OUT]

The kinds of sockets: `silent` sends nothing, `header` a byte of a request's head a second, `body` a byte of its body a
second, `idle` one whole request, `websocket` opens a WebSocket and answers pings, `mixed` is all of them in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import resource
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp
import msgspec

from benchmarks import termination
from benchmarks.forerun_service import serve_command
from benchmarks.machine import Machine, describe_machine
from benchmarks.server_process import serving

KINDS = ("silent", "header", "body", "idle", "websocket")
PROBE_SECONDS = 0.1
CONNECTING_AT_ONCE = 200
DRIP_SECONDS = 1.0

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100000\r\n\r\n"
OPENINGS = {
    "silent": b"",
    "header": b"POST /v1/completions HTTP/1.1\r\nX-Slow: ",
    "body": HEAD + b'{"prompt": "',
    "idle": b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "websocket": b"GET /v1/stream HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
}
MASKED_PONG = b"\x8a\x80\0\0\0\0"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What honest clients saw, and what became of the sockets."""

    kind: str
    sockets: int
    files: int
    connected: int
    """Sockets that were opened at all."""
    probes: int
    answered: int
    """Probes with status 200."""
    quiet_median_seconds: float
    """Latency of probes before the sockets were opened."""
    median_seconds: float
    worst_seconds: float
    closed_seconds: float | None
    """From the last opening until the service had closed every socket; None if it had not in time."""
    left_open: int
    log_bytes: int
    machine: Machine


class Probe:
    """An honest client that sends small requests, each on a connection of its own, until it is told to end."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.seconds: list[float] = []
        self.failures: list[str] = []

    async def run(self, until: Callable[[], bool]) -> None:
        body = {"prompt": "Hi", "max_tokens": 1}
        while not until():
            sent_at = time.perf_counter()
            try:
                async with (
                    aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(30)) as session,
                    session.post(f"{self._url}/v1/completions", json=body) as response,
                ):
                    await response.read()
                    if response.status != 200:
                        self.failures.append(str(response.status))
            except (aiohttp.ClientError, TimeoutError) as error:
                self.failures.append(repr(error))
            self.seconds.append(time.perf_counter() - sent_at)
            await asyncio.sleep(PROBE_SECONDS)


class Sockets:
    """Connections that keep a service busy without asking it for anything."""

    def __init__(self, port: int, kinds: Sequence[str]) -> None:
        self._port = port
        self._kinds = kinds
        self._tasks: list[asyncio.Task[None]] = []
        self._gate = asyncio.Semaphore(CONNECTING_AT_ONCE)
        self._changed = asyncio.Event()
        self.num_connected = 0
        self.num_open = 0

    def open(self, count: int) -> None:
        """Begin to open `count` sockets."""
        for index in range(count):
            self._tasks.append(asyncio.create_task(self._hold(self._kinds[index % len(self._kinds)])))

    async def opened(self) -> None:
        """Wait until each has been opened, or was refused."""
        while self.num_connected < len(self._tasks):
            self._changed.clear()
            await self._changed.wait()

    async def closed(self) -> None:
        """Wait until the service has closed each."""
        while self.num_open:
            self._changed.clear()
            await self._changed.wait()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _hold(self, kind: str) -> None:
        """One socket until the service closes it."""
        try:
            async with self._gate:
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                writer.write(OPENINGS[kind])
        except OSError:
            return
        finally:
            self.num_connected += 1
            self._changed.set()
        self.num_open += 1
        drip = b"a" if kind in {"header", "body"} else b""
        try:
            while True:
                try:
                    async with asyncio.timeout(DRIP_SECONDS if drip else None):
                        data = await reader.read(4096)
                except TimeoutError:
                    writer.write(drip)
                    continue
                if not data:
                    return
                if kind == "websocket" and data[:1] == b"\x89":
                    writer.write(MASKED_PONG)
        except OSError:
            return
        finally:
            self.num_open -= 1
            self._changed.set()
            writer.close()


async def measure(count: int, files: int, kind: str, flags: Sequence[str], patience: float) -> Report:
    """Start a service with a file limit, open sockets, and watch until they are closed or `patience` is over."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"

        def command(port: int) -> list[str]:
            serve = shlex.join(serve_command(flags)(port))
            return ["bash", "-c", f"ulimit -n {files}; exec {serve} 2> {shlex.quote(str(log))}"]

        async with serving(command, "/health/ready") as server:
            is_over = False
            quiet = Probe(server.url)
            quiet_until = time.monotonic() + 3.0
            await quiet.run(lambda: time.monotonic() >= quiet_until)
            before = log.stat().st_size
            probe = Probe(server.url)
            probing = asyncio.create_task(probe.run(lambda: is_over))
            sockets = Sockets(int(server.url.rpartition(":")[2]), KINDS if kind == "mixed" else [kind])
            sockets.open(count)
            await sockets.opened()
            opened_at = time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await sockets.closed()
            closed = None if sockets.num_open else time.monotonic() - opened_at
            left_open = sockets.num_open
            await asyncio.sleep(1.0)
            is_over = True
            await probing
            await sockets.close()
            log_bytes = log.stat().st_size - before
    for failure in set(probe.failures):
        print(f"probe: {failure} x {probe.failures.count(failure)}", file=sys.stderr)
    return Report(
        kind=kind,
        sockets=count,
        files=files,
        connected=sockets.num_connected,
        probes=len(probe.seconds),
        answered=len(probe.seconds) - len(probe.failures),
        quiet_median_seconds=statistics.median(quiet.seconds),
        median_seconds=statistics.median(probe.seconds),
        worst_seconds=max(probe.seconds),
        closed_seconds=closed,
        left_open=left_open,
        log_bytes=log_bytes,
        machine=describe_machine(),
    )


def main() -> int:
    """Measure, print, write the report; the status is 1 if a probe was not answered."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.silent_sockets", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--sockets", type=int, default=5000, help="how many are opened (default: 5000)")
    parser.add_argument("--files", type=int, default=1024, help="limit of open files, soft and hard (default: 1024)")
    parser.add_argument("--kind", choices=[*KINDS, "mixed"], default="silent", help="what they do (default: silent)")
    parser.add_argument("--patience", type=float, default=30.0, help="seconds to wait for their end (default: 30)")
    parser.add_argument("--forerun-args", default="", metavar="FLAGS", help="flags of the service")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the report there")
    arguments = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    flags = shlex.split(arguments.forerun_args)
    try:
        report = termination.run(measure(arguments.sockets, arguments.files, arguments.kind, flags, arguments.patience))
    except (OSError, RuntimeError) as error:
        print(f"benchmarks.silent_sockets: {error}", file=sys.stderr)
        return 2
    closed = "not all" if report.closed_seconds is None else f"{report.closed_seconds:.1f} s"
    print(f"{report.sockets} sockets ({report.kind}), {report.files} files")
    print(f"probes answered    {report.answered} of {report.probes}")
    print(f"quiet median       {1000 * report.quiet_median_seconds:.0f} ms")
    print(f"median             {1000 * report.median_seconds:.0f} ms")
    print(f"worst              {1000 * report.worst_seconds:.0f} ms")
    print(f"log                {report.log_bytes} bytes")
    print(f"closed after       {closed}, {report.left_open} left open")
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    return 0 if report.answered == report.probes else 1


if __name__ == "__main__":
    sys.exit(main())
