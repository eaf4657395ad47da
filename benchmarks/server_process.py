"""A server under measurement: a process of its own, awaited until it is ready, and gone at the end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import IO

import aiohttp

POLL_SECONDS = 0.1
STOP_SECONDS = 10.0
Command = Callable[[int], Sequence[str]]
"""The command line that serves at a port."""


class ServerFailedError(RuntimeError):
    """A server did not start; the message ends with what it last said."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is ready."""

    url: str
    pid: int
    """Of the process that was started; it may have others."""


def cpu_seconds(pid: int) -> float | None:
    """Processor time of a process alone, so far; None where the system does not tell."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # its CPU clock, see clock_getcpuclockid(3)
    except OSError:
        return None


@asynccontextmanager
async def serving(command: Command, ready_path: str, *, start_seconds: float = 900.0) -> AsyncIterator[Server]:
    """Start a server on a free port of this machine and wait until `ready_path` answers 200.

    Raises `ServerFailedError` if it ends, or is not ready in time.
    """
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *command(port), stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            try:
                async with asyncio.timeout(start_seconds):
                    await _until_ready(url + ready_path, process)
            except TimeoutError:
                raise ServerFailedError(f"not ready in {start_seconds:g} s: {_tail(log)}") from None
            if process.returncode is not None:
                raise ServerFailedError(f"exited with status {process.returncode}: {_tail(log)}")
            yield Server(url, process.pid)
        finally:
            await _stop(process)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


async def _until_ready(url: str, process: asyncio.subprocess.Process) -> None:
    async with aiohttp.ClientSession() as session:
        while process.returncode is None:
            with suppress(aiohttp.ClientError):
                async with session.get(url) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(POLL_SECONDS)


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Ask it to end, and its whole group if it does not."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def _tail(log: IO[bytes]) -> str:
    size = log.seek(0, os.SEEK_END)
    log.seek(max(size - 2000, 0))
    return log.read().decode(errors="replace").strip()
