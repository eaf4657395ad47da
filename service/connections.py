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
import errno
import resource
import socket
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any, cast

import structlog
from aiohttp import web

from service.body_budget import SMALL_BODY_BYTES
from service.errors import ApiError
from service.request_handler import FIXED_HEADERS, RequestHandler
from service.settings import ServerSettings

BACKLOG = 1024
"""Connections that may wait in the kernel to be accepted."""
MAX_ACCEPTS_AT_ONCE = 64
"""Connections accepted before the event loop turns to something else."""
RETRY_SECONDS = 1.0
"""Pause of accepting when the process or the system has no file left."""
SWEEP_SECONDS = 1.0
LINGER_SECONDS = 1.0
"""How long a refused or ended connection stays open for its client to read why."""
MAX_LINGERING = 32
"""Refused connections that stay open at a time; further ones are closed at once."""
FIRST_REQUEST_SECONDS = 1.0
"""How long a connection may be silent before it is closed rather than one that is idle."""
STALL_GRACE_SECONDS = 2.0
"""How much later than `stall_seconds` a connection is ended here: who writes a stream ends it first, and counts it."""
DISCARD_SECONDS = 5.0
"""How long the rest of a body that nobody wants is read and discarded, so that its client can read the answer."""

CONTROL_BYTES_PER_SECOND = 32
"""Bytes of pings and pongs that a WebSocket may receive without their counting as part of a message."""

NEVER_SECONDS = 86_400.0
"""Keep-alive time of aiohttp's own timer, which the deadlines here replace."""

RESERVED_FILES = 160
"""Files that are not for clients: log, libraries, event loop, store, listening sockets, refused connections."""
FILES_PER_ENGINE = 8
MIN_CONNECTIONS = 16
MAX_CONNECTIONS = 10_000
"""Bounds of the limit that is derived from the file limit."""

EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
TRY_AGAIN_LATER = b"\x88\x02\x03\xf5"
"""A WebSocket's close frame with status 1013."""

_log = structlog.get_logger("forerun.connections")


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard one, for this process and those it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        _log.warning("the limit of open files stays as it is", limit=soft, reason=str(error))


def connection_limit(settings: ServerSettings, num_engines: int) -> int:
    """Most client connections at a time: as set, else what the file limit leaves beside the service's own files."""
    if settings.max_connections is not None:
        return settings.max_connections
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    room = num_files - RESERVED_FILES - FILES_PER_ENGINE * num_engines
    return min(max(room, MIN_CONNECTIONS), MAX_CONNECTIONS)


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


class ClientSite(web.BaseSite):
    """Listens at a host and a port, and accepts connections up to the limit of a table."""

    def __init__(self, runner: web.AppRunner, host: str, port: int, table: ConnectionTable) -> None:
        super().__init__(runner)
        self._host = host
        self._port = port
        self._table = table

    @property
    def name(self) -> str:
        return f"http://{self._host}:{self._port}"

    async def start(self) -> None:
        """Raises OSError if it cannot listen there."""
        await super().start()
        server = self._runner.server
        assert server is not None
        loop = asyncio.get_running_loop()

        def protocol() -> Connection:
            return Connection(
                self._table,
                server,
                loop=loop,
                access_log=None,
                keepalive_timeout=NEVER_SECONDS,
                lingering_time=DISCARD_SECONDS,
            )

        acceptor = Acceptor(await _listen(self._host, self._port), protocol, self._table)
        self._server = cast(asyncio.AbstractServer, acceptor)  # of which a site uses `close` and `sockets`


async def _listen(host: str, port: int) -> list[socket.socket]:
    """A listening socket for each address of a host."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            listener = socket.socket(family, kind, protocol)
            listeners.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
            listener.setblocking(False)
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


class Acceptor:
    """Accepts connections of listening sockets until it is closed."""

    def __init__(
        self, listeners: list[socket.socket], protocol: Callable[[], Connection], table: ConnectionTable
    ) -> None:
        self.sockets = listeners
        self._protocol = protocol
        self._table = table
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._lingering: deque[socket.socket] = deque()
        self._refusals = LogThrottle("connections are refused: every one of the limit is busy")
        self._shortages = LogThrottle("no connection can be accepted")
        self._is_closed = False
        for listener in listeners:
            self._loop.add_reader(listener, self._accept, listener)

    def close(self) -> None:
        self._is_closed = True
        for listener in self.sockets:
            self._loop.remove_reader(listener)
            listener.close()
        self.sockets = []
        for refused in self._lingering:
            refused.close()
        self._lingering.clear()
        self._table.stop()

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(MAX_ACCEPTS_AT_ONCE):
            try:
                client, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in EXHAUSTED:
                    raise
                self._pause(listener, error)
                return
            client.setblocking(False)
            if self._table.num_open >= self._table.max_open and not self._table.evict():
                self._refuse(client)
                continue
            self._table.opened()
            task = self._loop.create_task(self._connect(client))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self, client: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, client)
        except OSError:
            self._table.closed(None)
            client.close()

    def _pause(self, listener: socket.socket, error: OSError) -> None:
        """Accept nothing for a while: what waits in the kernel would wake the loop again and again."""
        self._shortages.warn(self._loop.time(), reason=str(error), open=self._table.num_open)
        self._table.evict()
        self._loop.remove_reader(listener)
        self._loop.call_later(RETRY_SECONDS, self._resume, listener)

    def _resume(self, listener: socket.socket) -> None:
        if not self._is_closed:
            self._loop.add_reader(listener, self._accept, listener)

    def _refuse(self, client: socket.socket) -> None:
        """Answer 503, without a protocol or a task."""
        self._table.ended["refused"] += 1
        self._refusals.warn(self._loop.time(), most=self._table.max_open)
        try:
            client.send(TOO_MANY_CONNECTIONS)
            client.shutdown(socket.SHUT_WR)
        except OSError:
            client.close()
            return
        if len(self._lingering) >= MAX_LINGERING:
            self._lingering.popleft().close()
        self._lingering.append(client)
        self._loop.call_later(LINGER_SECONDS, self._forget, client)

    def _forget(self, client: socket.socket) -> None:
        if client in self._lingering:
            self._lingering.remove(client)
            client.close()


def handle_loop_errors(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Exception handler of an event loop: a server of asyncio's own that finds no file logs one line a second."""
    if "socket.accept() out of system resource" in str(context.get("message")):
        _SHORTAGES.warn(loop.time(), reason=str(context.get("exception")))
    else:
        loop.default_exception_handler(context)


_SHORTAGES = LogThrottle("no connection can be accepted")


def _whole_response(status: str, error: ApiError) -> bytes:
    """An error as the bytes of an HTTP response that ends its connection."""
    body = error.encode()
    ending = {"Content-Type": "application/json", "Content-Length": len(body), "Connection": "close"}
    fields = {**FIXED_HEADERS, **error.headers, **ending}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body


TOO_MANY_CONNECTIONS = _whole_response(
    "503 Service Unavailable",
    ApiError.unavailable("every connection this service allows is busy; try again shortly", "too_many_connections"),
)
HEADER_TIMEOUT = _whole_response(
    "408 Request Timeout",
    ApiError(408, "the request's first line and headers took too long to arrive", code="request_timeout"),
)
