"""One life of an engine process: started, listened to, told what to do, and certainly gone at the end."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from speculation.framing import FrameReader, FramingError, encode_frame
from speculation.messages import Command, Event

READ_BYTES = 256 * 1024
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class EngineDiedError(Exception):
    """The engine process ended, or its connection did; the message says how."""


class EngineProcess:
    """A connected engine process. Made by `start_engine`."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: Command) -> None:
        """Queue a command. A dead engine is noticed by `events`, not here."""
        if not self._writer.is_closing():
            self._writer.write(encode_frame(command))

    async def events(self) -> AsyncGenerator[Event, None]:
        """What the engine says, until it is gone. Raises `EngineDiedError` at the end, whatever ended it."""
        frames = FrameReader[Event](Event)
        try:
            while data := await self._reader.read(READ_BYTES):
                for event in frames.feed(data):
                    yield event
        except (OSError, FramingError) as error:
            raise EngineDiedError(f"the connection to the engine broke: {error}") from error
        raise EngineDiedError(await self._how_it_ended())

    async def wait(self) -> int:
        """The exit status, when the process has ended."""
        return await self._process.wait()

    async def _how_it_ended(self) -> str:
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._process.wait()
        return describe_exit(self._process.returncode)


def describe_exit(returncode: int | None) -> str:
    """How a process ended, in words."""
    if returncode is None:
        return "the engine closed its connection"
    if returncode < 0:
        return f"the engine was ended by {signal.Signals(-returncode).name}"
    return f"the engine exited with status {returncode}"


@asynccontextmanager
async def start_engine(
    command: Sequence[str], *, connect_seconds: float, stop_seconds: float
) -> AsyncIterator[EngineProcess]:
    """Start `command` with `--socket PATH` behind it and wait until it connects there; at the end it is gone.

    The socket lies in a folder that only this user can enter. The process is in a session of its own, so that a
    signal from the terminal does not reach it before the front has finished its requests. An engine ends when its
    connection does, and so also when the front is killed. Raises `EngineDiedError` if it ends, or takes longer than
    `connect_seconds`, before it connects.
    """
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="forerun-"))
        path = Path(folder) / "engine.sock"
        connected: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if connected.done():
                writer.close()
            else:
                connected.set_result((reader, writer))

        server = await asyncio.start_unix_server(accept, path, limit=READ_BYTES)
        stack.callback(server.close)
        process = await asyncio.create_subprocess_exec(
            *command,
            "--socket",
            str(path),
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        stack.push_async_callback(_stop, process, connected, stop_seconds)
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
        raise EngineDiedError(describe_exit(process.returncode))
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
