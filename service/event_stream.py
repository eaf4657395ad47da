"""Server-sent events to one client, who may read slowly, not at all, or leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress

from aiohttp import web

OPENING_SECONDS = 1.0
"""Time after which a stream begins although no token has come. Until then an error is a status of its own."""
KEEP_ALIVE_SECONDS = 10.0
"""Pause after which a comment is sent, so that no proxy takes the connection for dead."""
COMMENT = b": keep-alive\n\n"

HIGH_WATER_BYTES = 32 * 1024
"""What may wait in the process for one client's socket; beyond it, writing waits for the client."""


class ClientStalledError(ConnectionError):
    """The client read nothing for too long, and was disconnected."""


class EventStream:
    """A response of `text/event-stream`. Writing raises `ClientStalledError` when the client does not read."""

    def __init__(self, request: web.Request, *, stall_seconds: float) -> None:
        self._request = request
        self._stall_seconds = stall_seconds
        self._lock = asyncio.Lock()
        self._sent_at = 0.0
        """When something was last sent, by the event loop's clock."""
        self.response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )

    @property
    def has_begun(self) -> bool:
        """Whether the status has gone out, so that an error must be an event."""
        return self.response.prepared

    async def send(self, events: Iterable[bytes]) -> None:
        """Write events, all at once."""
        async with self._lock:
            await self._write(b"".join(b"data: " + event + b"\n\n" for event in events))

    @asynccontextmanager
    async def kept_alive(self, opening: Callable[[], Iterable[bytes]]) -> AsyncIterator[None]:
        """Begin the stream with `opening` if nothing is sent for a second, and send comments in pauses."""
        task = asyncio.create_task(self._keep_alive(opening), name="keep-alive")
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError, ConnectionError):  # the client is gone, as the next write will find
                await task

    async def _keep_alive(self, opening: Callable[[], Iterable[bytes]]) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(OPENING_SECONDS)
        async with self._lock:
            if not self.has_begun:
                events = b"".join(b"data: " + event + b"\n\n" for event in opening())
                await self._write(events or COMMENT)
        while True:
            await asyncio.sleep(max(self._sent_at + KEEP_ALIVE_SECONDS - loop.time(), 0.0))
            async with self._lock:
                if loop.time() >= self._sent_at + KEEP_ALIVE_SECONDS:
                    await self._write(COMMENT)

    async def _write(self, data: bytes) -> None:
        if not self.response.prepared:
            await self.response.prepare(self._request)
            limit_writes(self._request)
        try:
            async with asyncio.timeout(self._stall_seconds):
                await self.response.write(data)
        except TimeoutError:
            drop(self._request)
            raise ClientStalledError(f"the client read nothing for {self._stall_seconds:g} s") from None
        self._sent_at = asyncio.get_running_loop().time()

    async def end(self) -> None:
        """No event follows."""
        await self.response.write_eof()


def limit_writes(request: web.BaseRequest) -> None:
    """Let writing wait for the client early, so that what waits for it stays small."""
    if request.transport is not None:
        request.transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)


def drop(request: web.BaseRequest) -> None:
    """Close the connection now, whatever waits to be written."""
    if request.transport is not None:
        request.transport.abort()
