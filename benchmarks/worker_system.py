"""A system that a worker process runs; see `benchmarks.workers`."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import IO

import msgspec

from benchmarks.system import Answer, Ask

ROOT = Path(__file__).resolve().parent.parent
LINE_BYTES = 1 << 26
STOP_SECONDS = 10.0


class WorkerFailedError(RuntimeError):
    """A worker ended; the message ends with what it last said."""


class Hello(msgspec.Struct, frozen=True):
    """A worker's first line."""

    precision: str


class WorkerSystem:
    """A running worker."""

    def __init__(
        self, name: str, method: str, precision: str, process: asyncio.subprocess.Process, log: IO[bytes]
    ) -> None:
        self.name = name
        self.method = method
        self.precision = precision
        self._process = process
        self._log = log

    async def answer(self, asks: Sequence[Ask]) -> list[Answer]:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(asks) + b"\n")
        await self._process.stdin.drain()
        return msgspec.json.decode(await _line(self._process, self._log), type=list[Answer])


@asynccontextmanager
async def running_worker(
    name: str, method: str, python: Path, module: str, arguments: Sequence[str]
) -> AsyncIterator[WorkerSystem]:
    """Start `benchmarks.workers.MODULE` with an interpreter. Raises `WorkerFailedError` if it does not get ready."""
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            python,
            "-m",
            f"benchmarks.workers.{module}",
            *arguments,
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            limit=LINE_BYTES,
        )
        try:
            hello = msgspec.json.decode(await _line(process, log), type=Hello)
            yield WorkerSystem(name, method, hello.precision, process, log)
        finally:
            await _stop(process)


async def _line(process: asyncio.subprocess.Process, log: IO[bytes]) -> bytes:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        log.seek(max(log.seek(0, 2) - 2000, 0))
        said = log.read().decode(errors="replace").strip()
        raise WorkerFailedError(f"exited with status {await process.wait()}: {said}")
    return line


async def _stop(process: asyncio.subprocess.Process) -> None:
    """A worker ends when its input does."""
    assert process.stdin is not None
    process.stdin.close()
    with suppress(TimeoutError):
        async with asyncio.timeout(STOP_SECONDS):
            await process.wait()
    if process.returncode is None:
        process.kill()
        await process.wait()
