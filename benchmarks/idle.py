"""What a forerun costs that nobody asks anything: the time until it is ready, its memory, its processor time.

    python -m benchmarks.idle [--seconds 10] [--forerun-args FLAGS] [--json OUT]

Run it twice: the first start may convert the model or compile the native step.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from benchmarks import termination
from benchmarks.forerun_service import serve_command
from benchmarks.machine import Machine, describe_machine
from benchmarks.server_process import cpu_seconds, serving


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the service."""

    command: str
    memory_mb: float
    """Proportional set size: memory that several processes share is counted once over all of them."""
    cpu_share: float
    """Of one core."""


class IdleReport(msgspec.Struct, frozen=True, kw_only=True):
    """A service at rest."""

    ready_seconds: float
    """From its start until /health/ready said so."""
    memory_mb: float
    cpu_share: float
    processes: list[Process]
    machine: Machine


async def measure(flags: Sequence[str], seconds: float) -> IdleReport:
    """Start a service, let it rest for `seconds`, and stop it."""
    started_at = time.perf_counter()
    async with serving(serve_command(flags), "/health/ready") as server:
        ready_seconds = time.perf_counter() - started_at
        await asyncio.sleep(2.0)  # what the start leaves to do is not idling
        pids = [server.pid, *descendants(server.pid)]
        before = {pid: cpu_seconds(pid) or 0.0 for pid in pids}
        await asyncio.sleep(seconds)
        processes = [
            Process(
                command=_command(pid),
                memory_mb=memory_mb(pid),
                cpu_share=((cpu_seconds(pid) or 0.0) - before[pid]) / seconds,
            )
            for pid in pids
        ]
    return IdleReport(
        ready_seconds=ready_seconds,
        memory_mb=sum(process.memory_mb for process in processes),
        cpu_share=sum(process.cpu_share for process in processes),
        processes=processes,
        machine=describe_machine(),
    )


def descendants(pid: int) -> Iterator[int]:
    """Every process that `pid` started, and theirs; from Linux's /proc. Those that end meanwhile may be missing."""
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in list(Path(f"/proc/{pid}/task").iterdir()):
            for child in map(int, (task / "children").read_text().split()):
                yield child
                yield from descendants(child)


def memory_mb(pid: int, kind: str = "Pss") -> float:
    """Proportional set size of a process, in units of 10^6 bytes; or another `kind` in smaps_rollup, such as "Rss"."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(f"{kind}:"))


def _command(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return " ".join(words[1:3])


def main() -> int:
    """Measure, print, write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.idle", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to watch it (default: 10)")
    parser.add_argument("--forerun-args", default="", metavar="FLAGS", help="flags of the service")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the report there")
    arguments = parser.parse_args()
    try:
        report = termination.run(measure(shlex.split(arguments.forerun_args), arguments.seconds))
    except (OSError, RuntimeError) as error:
        print(f"benchmarks.idle: {error}", file=sys.stderr)
        return 2
    print(f"ready after {report.ready_seconds:.1f} s")
    for process in report.processes:
        print(f"{process.memory_mb:8.0f} MB {100.0 * process.cpu_share:6.2f} % of a core  {process.command}")
    print(f"{report.memory_mb:8.0f} MB {100.0 * report.cpu_share:6.2f} % of a core  in all")
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
