"""One connection to an engine: commands go out, events come in, and silence for too long ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from speculation.framing import FrameReader, FramingError, encode_frame
from speculation.messages import Command, Event, Ready

READ_BYTES = 256 * 1024
TICKS = 5
"""An engine is silent when it was so at so many looks in a row. A front that was itself stopped for a while has looked
but once, and finds what came meanwhile before it looks again."""


class EngineDiedError(Exception):
    """The engine ended, or its connection did; the message says how."""


class EngineLink:
    """The front's side of a connected engine."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, end: Callable[[], None] | None = None
    ) -> None:
        """`end` sees to it that nothing more comes of an engine that fell silent; without it the connection is cut."""
        self._reader = reader
        self._writer = writer
        self._end = end or writer.transport.abort
        self._num_reads = 0
        self._died: str | None = None

    def send(self, command: Command) -> None:
        """Queue a command. A dead engine is noticed by `events`, not here."""
        if not self._writer.is_closing():
            self._writer.write(encode_frame(command))

    async def events(self, silence_seconds: float) -> AsyncGenerator[Event, None]:
        """What the engine says, until it is gone. Raises `EngineDiedError` at the end, whatever ended it.

        Once it has said `Ready`, and with it that it has a heartbeat, silence for `silence_seconds` is an end, too.
        """
        frames = FrameReader[Event](Event)
        watch: asyncio.Task[None] | None = None
        try:
            while data := await self._reader.read(READ_BYTES):
                self._num_reads += 1
                for event in frames.feed(data):
                    if isinstance(event, Ready) and event.heartbeat_seconds and watch is None:
                        watch = asyncio.create_task(self._listen_for_silence(silence_seconds), name="silence")
                    yield event
        except (OSError, FramingError) as error:
            raise EngineDiedError(self._died or f"the connection to the engine broke: {error}") from error
        finally:
            if watch is not None:
                watch.cancel()
        raise EngineDiedError(self._died or "the engine closed its connection")

    async def _listen_for_silence(self, seconds: float) -> None:
        num_silent = 0
        while num_silent < TICKS:
            num_reads = self._num_reads
            await asyncio.sleep(seconds / TICKS)
            num_silent = 0 if self._num_reads != num_reads else num_silent + 1
        self._died = f"the engine said nothing for {seconds:g} s"
        self._end()
