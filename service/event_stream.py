"""Server-sent events to one client, who may read slowly, not at all, or leave."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from aiohttp import web

HIGH_WATER_BYTES = 32 * 1024
"""What may wait in the process for one client's socket; beyond it, writing waits for the client."""


class ClientStalledError(ConnectionError):
    """The client took nothing for too long, and was dropped."""


class EventStream:
    """A response of `text/event-stream`. Writing raises `ClientStalledError` when the client does not read."""

    def __init__(self, request: web.Request, *, stall_seconds: float) -> None:
        self._request = request
        self._stall_seconds = stall_seconds
        self.response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )

    @property
    def has_begun(self) -> bool:
        """Whether the status has gone out, so that an error must be an event."""
        return self.response.prepared

    async def send(self, events: Iterable[bytes]) -> None:
        """Write events, all at once."""
        if not self.response.prepared:
            await self.response.prepare(self._request)
            limit_writes(self._request)
        try:
            async with asyncio.timeout(self._stall_seconds):
                await self.response.write(b"".join(b"data: " + event + b"\n\n" for event in events))
        except TimeoutError:
            drop(self._request)
            raise ClientStalledError(f"the client read nothing for {self._stall_seconds:g} s") from None

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
