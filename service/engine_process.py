"""One life of an engine process: started, listened to, told what to do, and certainly gone at the end."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

from service.engine_link import READ_BYTES, EngineDiedError, EngineLink
from speculation.messages import Command, Event

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class EngineProcess:
    """A connected engine process. Made by `start_engine`."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._link = EngineLink(reader, writer, end=self._kill)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: Command) -> None:
        """See `EngineLink`."""
        self._link.send(command)

    async def events(self, silence_seconds: float) -> AsyncGenerator[Event, None]:
        """See `EngineLink`. One that falls silent is killed: it may be stopped, and would not notice anything else."""
        try:
            async with aclosing(self._link.events(silence_seconds)) as events:
                async for event in events:
                    yield event
        except EngineDiedError as died:
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._process.wait()
            ending = describe_exit(self._process.returncode)
            raise EngineDiedError(f"{died}{ending}") from died

    async def wait(self) -> int:
        """The exit status, when the process has ended."""
        return await self._process.wait()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def describe_exit(returncode: int | None) -> str:
    """How a process ended, in words that go on with a sentence; empty if it has not."""
    if returncode is None:
        return ""
    if returncode < 0:
        return f"; its process was ended by {signal.Signals(-returncode).name}"
    return f"; its process exited with status {returncode}"


@asynccontextmanager
async def start_engine(
    command: Sequence[str], *, connect_seconds: float, stop_seconds: float, cores: Sequence[int] | None = None
) -> AsyncIterator[EngineProcess]:
    """Start `command` with `--socket PATH` behind it and wait until it connects there; at the end it is gone.

    The socket lies in a folder that only this user can enter. The process is in a session of its own, so that a
    signal from the terminal does not reach it before the front has finished its requests. An engine ends when its
    connection does, and so also when the front is killed. Raises `EngineDiedError` if it ends, or takes longer than
    `connect_seconds`, before it connects. `cores` are those it keeps to.
    """
    connected: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if connected.done():
            writer.close()
        else:
            connected.set_result((reader, writer))

    async with AsyncExitStack() as stack:
        # The folder is gone as soon as the engine is connected, so that a front that is killed leaves nothing behind.
        with tempfile.TemporaryDirectory(prefix="forerun-") as folder:
            path = Path(folder) / "engine.sock"
            with closing(await asyncio.start_unix_server(accept, path, limit=READ_BYTES)):
                process = await asyncio.create_subprocess_exec(
                    *command,
                    "--socket",
                    str(path),
                    stdin=asyncio.subprocess.DEVNULL,
                    start_new_session=True,
                )
                stack.push_async_callback(_stop, process, connected, stop_seconds)
                if cores is not None:
                    with suppress(OSError):  # it has ended already, or may not be told
                        os.sched_setaffinity(process.pid, cores)
                reader, writer = await _connection(process, connected, connect_seconds)
        stack.callback(writer.close)
        yield EngineProcess(process, reader, writer)


async def _connection(
    process: asyncio.subprocess.Process,
    connected: asyncio.Future[Connection],
    connect_seconds: float,
) -> Connection:
    ended = asyncio.ensure_future(process.wait())
    try:
        waited: set[asyncio.Future[Any]] = {connected, ended}
        await asyncio.wait(waited, timeout=connect_seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended.cancel()
    if connected.done():
        return connected.result()
    if process.returncode is not None:
        raise EngineDiedError(f"it did not connect{describe_exit(process.returncode)}")
    raise EngineDiedError(f"the engine did not connect within {connect_seconds:g} s")


async def _stop(
    process: asyncio.subprocess.Process, connected: asyncio.Future[Connection], stop_seconds: float
) -> None:
    """End the process: one that was connected has seen that end; then SIGTERM, then SIGKILL, to all of its session."""
    connection_closed = [(None, stop_seconds)] if connected.done() else []
    for how, patience in (*connection_closed, (signal.SIGTERM, stop_seconds), (signal.SIGKILL, None)):
        if process.returncode is not None:
            return
        if how is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, how)
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await process.wait()
