"""Connections of clients are accepted up to a limit; beyond it they are answered 503, or take a silent one's place."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, cast

from aiohttp import web

from service.connections import LINGER_SECONDS, Connection, ConnectionTable, LogThrottle, whole_response
from service.errors import ApiError

BACKLOG = 1024
"""Connections that may wait in the kernel to be accepted."""
MAX_ACCEPTS_AT_ONCE = 64
"""Connections accepted before the event loop turns to something else."""
RETRY_SECONDS = 1.0
"""Pause of accepting when the process or the system has no file left."""
MAX_LINGERING = 32
"""Refused connections that stay open at a time; further ones are closed at once."""
DISCARD_SECONDS = 5.0
"""How long the rest of a body that nobody wants is read and discarded, so that its client can read the answer."""
NEVER_SECONDS = 86_400.0
"""Keep-alive time of aiohttp's own timer, which the deadlines here replace."""
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
TOO_MANY_CONNECTIONS = whole_response(
    "503 Service Unavailable",
    ApiError.unavailable("every connection this service allows is busy; try again shortly", "too_many_connections"),
)


class ClientSite(web.BaseSite):
    """Listens at a host and a port, and accepts connections up to the limit of a table."""

    def __init__(
        self,
        runner: web.AppRunner,
        host: str,
        port: int,
        table: ConnectionTable,
        *,
        tls: ssl.SSLContext | None,
        handshake_seconds: float,
    ) -> None:
        """`tls` has the certificate of HTTPS; a handshake that takes longer than `handshake_seconds` is given up."""
        super().__init__(runner, ssl_context=tls)
        self._handshake_seconds = handshake_seconds
        self._host = host
        self._port = port
        self._table = table

    @property
    def name(self) -> str:
        return f"{'https' if self._ssl_context else 'http'}://{self._host}:{self._port}"

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

        connect = partial(loop.connect_accepted_socket, protocol)
        if self._ssl_context is not None:
            connect = partial(connect, ssl=self._ssl_context, ssl_handshake_timeout=self._handshake_seconds)
        acceptor = Acceptor(await _listen(self._host, self._port), connect, self._table)
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
        self,
        listeners: list[socket.socket],
        connect: Callable[[socket.socket], Awaitable[object]],
        table: ConnectionTable,
    ) -> None:
        """`connect` gives an accepted socket its protocol. It raises OSError where that fails."""
        self.sockets = listeners
        self._connect_client = connect
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
            await self._connect_client(client)
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
