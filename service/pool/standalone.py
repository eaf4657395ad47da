"""`forerun engine`: one engine that announces itself in the store and serves whichever fronts find it there."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
import structlog

from service.acceptor import handle_loop_errors
from service.engine_link import READ_BYTES
from service.logs import configure_logs
from service.pool.address import Address, advertised
from service.pool.engine_pool import EnginePool
from service.pool.handshake import HANDSHAKE_SECONDS
from service.pool.listener import Listener
from service.pool.prefixes import Prefixes
from service.pool.reporter import Reporter
from service.pool.routing import RoundRobin
from service.pool.security import Security
from service.pool.store import MEMORY, PoolStore, open_store
from service.settings import Settings
from service.supervisor import EngineStartError, Supervisor
from speculation.messages import Ready

_log = structlog.get_logger("forerun.listener")


async def run_engine(
    settings: Settings, announce: Callable[[str], None], engine_command: Sequence[str] | None = None
) -> int:
    """`serve_engine` as a command: until SIGTERM or SIGINT; a second signal ends it at once."""
    configure_logs(settings.engine.log_level, settings.engine.log_format)
    asyncio.get_running_loop().set_exception_handler(handle_loop_errors)
    stop = asyncio.Event()
    _handle_signals(stop)
    return await serve_engine(settings, announce, stop, engine_command)


async def serve_engine(
    settings: Settings,
    announce: Callable[[str], None],
    stop: asyncio.Event,
    engine_command: Sequence[str] | None = None,
) -> int:
    """Serve until `stop` is set, or until a front has drained it; the exit status.

    `engine_command` replaces the engine, for tests.
    """
    try:
        listen = Address.parse(settings.listener.listen, "listen")
        security = Security.load(settings.pool)
        security.check_listener(listen.host)
        if settings.pool.store == MEMORY:
            raise ValueError("store is memory; a stand-alone engine is found through a store: set store to redis://…")
        store = open_store(settings.pool)
    except ValueError as error:
        _log.error("cannot serve", reason=str(error))
        return 1
    # Opened here, not by the server below, so that the engine is announced under the port it has.
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    listener_socket = socket.socket(family)
    try:
        listener_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener_socket.bind((listen.host, listen.port))
    except OSError as error:
        listener_socket.close()
        _log.error("cannot listen", host=listen.host, port=listen.port, reason=str(error))
        return 1
    bound = Address(listen.host, listener_socket.getsockname()[1])
    try:
        address = advertised(settings.listener, bound)
        engine = StandaloneEngine(settings, store, address, security, engine_command or worker_command(settings))
        server = await asyncio.start_server(
            engine.listener.serve,
            sock=listener_socket,
            limit=READ_BYTES,
            ssl=security.server_tls,
            # Longer than a front waits: one that speaks no TLS then says so in its log.
            ssl_handshake_timeout=2 * HANDSHAKE_SECONDS if security.server_tls else None,
        )
        _log.info("listening", address=str(address), phase="loading")
        async with server:
            return await engine.run(stop, lambda: announce(f"forerun engine serves at {address}"))
    finally:
        await store.store.close()


def worker_command(settings: Settings) -> list[str]:
    """How the engine itself is started; the socket is added by who starts it."""
    engine = msgspec.json.encode(settings.engine).decode()
    return [sys.executable, "-m", "speculation.worker", "--settings", engine]


class StandaloneEngine:
    """The engine's life: its supervisor, its reports to the store, and the listener between it and fronts."""

    def __init__(
        self, settings: Settings, store: PoolStore, address: Address, security: Security, command: Sequence[str]
    ) -> None:
        self._settings = settings
        pool, prefixes = _private_pool(store)
        member = pool.add(f"{socket.gethostname()}-{address.port}-{os.getpid()}", str(address))
        self._reporter = member.observer = Reporter(
            member,
            prefixes,
            store,
            warm_seconds=settings.pool.warm_seconds,
            warm_prefixes=settings.pool.warm_prefixes,
        )
        self.listener = Listener(member, security.secret)
        self._opened = pool.opened
        self._supervisor = Supervisor(
            command,
            self.listener,
            on_ready=_accept_any,
            on_lost=lambda: None,
            load_seconds=settings.server.load_seconds,
            restart_seconds=settings.server.restart_seconds,
            silence_seconds=settings.pool.silence_seconds,
        )

    async def run(self, stop: asyncio.Event, announce: Callable[[], None]) -> int:
        """Serve until told to stop, or drained, or the engine cannot be started; the exit status."""
        life = asyncio.create_task(self._supervisor.run(), name="engine")
        waits = [asyncio.create_task(each.wait()) for each in (stop, self._opened)]
        try:
            done, _ = await asyncio.wait({life, *waits}, return_when=asyncio.FIRST_COMPLETED)
            if waits[1] in done:
                announce()
                await asyncio.wait({life, waits[0]}, return_when=asyncio.FIRST_COMPLETED)
            if not life.done():
                _log.info("shutting down", seconds=self._settings.server.shutdown_seconds)
                self.listener.drain()
                await asyncio.wait({life}, timeout=self._settings.server.shutdown_seconds)
        finally:
            for task in (life, *waits):
                task.cancel()
            (outcome, *_) = await asyncio.gather(life, *waits, return_exceptions=True)
            await self._reporter.close()
            await self.listener.close()
        if isinstance(outcome, EngineStartError):
            _log.error("cannot serve", reason=str(outcome))
        return 0 if outcome is None or isinstance(outcome, asyncio.CancelledError) else 1


async def _accept_any(_: Ready) -> None:
    """Whatever the model is: fronts know what they serve."""


def _private_pool(store: PoolStore) -> tuple[EnginePool, Prefixes]:
    """A pool that nobody submits to: it holds what a warm start computes, and nothing else."""
    prefixes = Prefixes(store.guarded)
    pool = EnginePool(
        RoundRobin(),
        prefixes,
        on_stats=lambda _: None,
        on_gap=lambda _: None,
        on_prompt=lambda *_: None,
        failover_seconds=1.0,
        failover_attempts=1,
    )
    return pool, prefixes


def _handle_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            sys.exit(1)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(NotImplementedError):
            loop.add_signal_handler(number, on_signal)
