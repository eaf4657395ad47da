"""Client connections: accepted up to a limit, with a deadline for whoever does not speak.

A connection is in one of these states, oldest first in each. Those above `busy` are closed, roughly in this order, when
a new connection needs the room; when every connection is busy, the new one is answered 503.

    speechless   no complete request head yet          closed after `header_seconds`
    idle         a request was answered, none follows  closed after `idle_seconds`
    quiet        a WebSocket on which nothing runs     kept while it answers pings
    receiving    a body is on its way                  see `service/bodies.py`
    busy         a request is being served
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter, OrderedDict
from typing import Any

import structlog
from aiohttp import web

from service.body_budget import SMALL_BODY_BYTES
from service.errors import ApiError
from service.request_handler import FIXED_HEADERS, RequestHandler
from service.settings import ServerSettings

SWEEP_SECONDS = 1.0
LINGER_SECONDS = 1.0
"""How long a refused or ended connection stays open for its client to read why."""
FIRST_REQUEST_SECONDS = 1.0
"""How long a connection may be silent before it is closed rather than one that is idle."""
STALL_GRACE_SECONDS = 2.0
"""How much later than `stall_seconds` a connection is ended here: who writes a stream ends it first, and counts it."""

CONTROL_BYTES_PER_SECOND = 32
"""Bytes of pings and pongs that a WebSocket may receive without their counting as part of a message."""


TRY_AGAIN_LATER = b"\x88\x02\x03\xf5"
"""A WebSocket's close frame with status 1013."""

_log = structlog.get_logger("forerun.connections")


class LogThrottle:
    """At most one line a second in the log for something that may happen thousands of times in one."""

    def __init__(self, message: str) -> None:
        self._message = message
        self._num_untold = 0
        self._told_at = float("-inf")

    def warn(self, now: float, **fields: object) -> None:
        self._num_untold += 1
        if now - self._told_at >= 1.0:
            _log.warning(self._message, times=self._num_untold, **fields)
            self._told_at, self._num_untold = now, 0


class ConnectionTable:
    """All client connections of a service, by state."""

    def __init__(
        self,
        settings: ServerSettings,
        max_open: int,
        loop: asyncio.AbstractEventLoop,
        max_message_bytes: int = sys.maxsize,
    ) -> None:
        self.max_message_bytes = max_message_bytes
        """Most bytes of large WebSocket messages that are arriving at a time."""
        self.max_open = max_open
        self.num_open = 0
        self.ended: Counter[str] = Counter()
        """Connections that the service ended or refused, by reason."""
        self._loop = loop
        self._speechless: OrderedDict[Connection, float] = OrderedDict()
        self._idle: OrderedDict[Connection, float] = OrderedDict()
        self._quiet: OrderedDict[Connection, float] = OrderedDict()
        self._receiving: OrderedDict[Connection, float] = OrderedDict()
        self._ending: OrderedDict[Connection, float] = OrderedDict()
        self._arriving: OrderedDict[Connection, float] = OrderedDict()
        """WebSockets on which a large message has begun to arrive."""
        self._num_message_bytes = 0
        self._queues = (self._speechless, self._idle, self._quiet, self._receiving)
        self._deadlines = (
            (self._speechless, settings.header_seconds, "header_timeout"),
            (self._idle, settings.idle_seconds, "idle"),
            (self._arriving, settings.body_seconds, "message_timeout"),
            (self._ending, LINGER_SECONDS, ""),
        )
        self._stall_seconds = settings.stall_seconds + STALL_GRACE_SECONDS
        self._stalled: dict[Connection, tuple[float, int]] = {}
        """Connections with data that their client does not take: since when, and how many bytes."""
        self._sweep: asyncio.TimerHandle | None = None
        self._evictions = LogThrottle("connections are closed to make room for new ones")

    def opened(self) -> None:
        """A connection was accepted."""
        self.num_open += 1
        if self._sweep is None:
            self._sweep = self._loop.call_later(SWEEP_SECONDS, self._end_overdue)

    def closed(self, connection: Connection | None) -> None:
        """A connection is gone; None for one that was lost before it had a protocol."""
        self.num_open -= 1
        if connection is not None:
            self.set_busy(connection)
            self.set_arrived(connection)
            self._ending.pop(connection, None)
            self._stalled.pop(connection, None)

    def set_speechless(self, connection: Connection) -> None:
        self._move(connection, self._speechless)

    def set_idle(self, connection: Connection) -> None:
        self._move(connection, self._idle)

    def set_quiet(self, connection: Connection) -> None:
        self._move(connection, self._quiet)

    def set_receiving(self, connection: Connection) -> None:
        self._move(connection, self._receiving)

    def set_busy(self, connection: Connection) -> None:
        for queue in self._queues:
            queue.pop(connection, None)

    def is_idle(self, connection: Connection) -> bool:
        return connection in self._idle

    def set_stalled(self, connection: Connection, num_bytes: int) -> None:
        """The client takes less than it is sent."""
        self._stalled[connection] = (self._loop.time(), num_bytes)

    def set_flowing(self, connection: Connection) -> None:
        self._stalled.pop(connection, None)

    def note_arriving(self, connection: Connection, num_new: int) -> None:
        """More bytes of a large message have arrived. The one that began first is ended if all are too many."""
        if connection not in self._arriving:
            self._arriving[connection] = self._loop.time()
            num_new = connection.num_arrived
        self._num_message_bytes += num_new
        while self._num_message_bytes > self.max_message_bytes and len(self._arriving) > 1:
            self._end(next(iter(self._arriving)), "evicted", TRY_AGAIN_LATER)

    def is_arriving(self, connection: Connection) -> bool:
        return connection in self._arriving

    def set_arrived(self, connection: Connection) -> None:
        """The message is whole, or nobody waits for it any more."""
        if self._arriving.pop(connection, None) is not None:
            self._num_message_bytes -= connection.num_arrived

    def evict(self) -> bool:
        """End the connection that is missed least, to make room for another; False if all are busy."""
        now = self._loop.time()
        connection = self._least_missed(now)
        if connection is None:
            return False
        self._end(connection, "evicted", TRY_AGAIN_LATER if connection in self._quiet else b"")
        self._evictions.warn(now, open=self.num_open, most=self.max_open)
        return True

    def _least_missed(self, now: float) -> Connection | None:
        """The oldest that is silent, but rather an idle one than one so young that its first request is on its way."""
        for connection, since in self._speechless.items():
            if now - since >= FIRST_REQUEST_SECONDS or len(self._speechless) > self.max_open // 2:
                return connection
            break
        for queue in (self._idle, self._quiet, self._receiving, self._speechless):
            if queue:
                return next(iter(queue))
        return None

    def stop(self) -> None:
        """Watch no longer."""
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None

    def _move(self, connection: Connection, queue: OrderedDict[Connection, float]) -> None:
        self.set_busy(connection)
        queue[connection] = self._loop.time()

    def _end_overdue(self) -> None:
        now = self._loop.time()
        for queue, seconds, reason in self._deadlines:
            while queue:
                connection, since = next(iter(queue.items()))
                if now - since < seconds:
                    break
                has_begun = queue is self._speechless and connection.has_head_begun
                farewell = TRY_AGAIN_LATER if queue is self._arriving else HEADER_TIMEOUT if has_begun else b""
                self._end(connection, reason, farewell)
        for connection, (since, num_bytes) in list(self._stalled.items()):
            if now - since >= self._stall_seconds:
                left = connection.num_unsent
                if left < num_bytes:
                    self._stalled[connection] = (now, left)
                else:
                    self._end(connection, "stalled", b"")
        self._sweep = self._loop.call_later(SWEEP_SECONDS, self._end_overdue) if self.num_open else None

    def _end(self, connection: Connection, reason: str, farewell: bytes) -> None:
        """Close a connection, behind some last bytes if there are any. It is counted until its socket is closed."""
        self.set_busy(connection)
        self.set_arrived(connection)
        self._ending.pop(connection, None)
        self._stalled.pop(connection, None)
        if reason:
            self.ended[reason] += 1
        if farewell:
            self._ending[connection] = self._loop.time()
        connection.end(farewell)


class Connection(RequestHandler):
    """The protocol of one connection, which tells a `ConnectionTable` what state it is in."""

    __slots__ = ("_is_discarding", "_message_since", "_socket", "_table", "has_head_begun", "num_arrived")

    def __init__(self, table: ConnectionTable, server: web.Server, **options: Any) -> None:
        super().__init__(server, **options)
        self._table = table
        self._socket: asyncio.Transport | None = None
        self._is_discarding = False
        """Whether what arrives is the rest of a body that was answered already."""
        self._message_since: float | None = None
        """When the last message of a WebSocket was whole; None where this is no WebSocket."""
        self.num_arrived = 0
        """Bytes of a WebSocket that came since."""
        self.has_head_begun = False
        """Whether part of a request's head has arrived, where no whole one has."""

    @property
    def num_unsent(self) -> int:
        """Bytes that wait for the client to take them."""
        return 0 if self._socket is None else self._socket.get_write_buffer_size()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert isinstance(transport, asyncio.Transport)
        self._socket = transport
        self._table.set_speechless(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._socket = None
        self._table.closed(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        num_requests = self._request_count
        super().data_received(data)
        if self._message_since is not None:
            self._note_part(len(data), self._message_since)
        elif self._request_count != num_requests:
            self.set_busy()
        elif data and self._current_request is None and not (self.has_head_begun or self._is_discarding or self._close):
            self.has_head_begun = True
            if self._table.is_idle(self):
                self._table.set_speechless(self)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            if self._socket is not None and not self._messages:
                self._is_discarding = not request.content.is_eof()
                if self.has_head_begun:
                    self._table.set_speechless(self)
                else:
                    self._table.set_idle(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._table.set_stalled(self, self.num_unsent)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._table.set_flowing(self)

    def set_receiving(self) -> None:
        """A body is awaited."""
        self._table.set_receiving(self)

    def set_busy(self) -> None:
        """A request is being served."""
        self.has_head_begun = self._is_discarding = False
        self._table.set_busy(self)

    def set_quiet(self) -> None:
        """This is a WebSocket on which nothing runs."""
        if self._socket is not None:
            self._table.set_quiet(self)

    def note_message(self) -> None:
        """A WebSocket has begun, or a message on it is whole."""
        self._table.set_arrived(self)
        self._message_since, self.num_arrived = asyncio.get_running_loop().time(), 0

    def _note_part(self, num_bytes: int, since: float) -> None:
        self.num_arrived += num_bytes
        seconds = asyncio.get_running_loop().time() - since
        is_large = self.num_arrived > SMALL_BODY_BYTES + CONTROL_BYTES_PER_SECOND * seconds
        if is_large or self._table.is_arriving(self):
            self._table.note_arriving(self, num_bytes)

    def end(self, farewell: bytes) -> None:
        """Close now, or when the last bytes are sent."""
        if self._socket is None:
            return
        if farewell:
            self._socket.write(farewell)
            self._socket.close()
        else:
            self._socket.abort()


def connection_of(request: web.BaseRequest) -> Connection | None:
    """The connection of a request; None where another server runs the application."""
    return request.protocol if isinstance(request.protocol, Connection) else None


def whole_response(status: str, error: ApiError) -> bytes:
    """An error as the bytes of an HTTP response that ends its connection."""
    body = error.encode()
    ending = {"Content-Type": "application/json", "Content-Length": len(body), "Connection": "close"}
    fields = {**FIXED_HEADERS, **error.headers, **ending}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body


HEADER_TIMEOUT = whole_response(
    "408 Request Timeout",
    ApiError(408, "the request's first line and headers took too long to arrive", code="request_timeout"),
)
