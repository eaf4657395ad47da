"""A running service: listens, announces itself, and goes away in good order."""

from __future__ import annotations

import asyncio
import signal
import ssl
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import structlog
from aiohttp import web

from service.acceptor import ClientSite, handle_loop_errors
from service.app import ENGINE_LIFE, ENGINES, create_app
from service.connections import ConnectionTable
from service.context import FRONT
from service.engine_client import EngineUnavailableError
from service.file_limit import connection_limit, raise_file_limit
from service.front import Front
from service.hosts import is_loopback
from service.logs import configure_logs
from service.memory import keep_heap_small
from service.metrics import ConnectionCollector
from service.settings import ServerSettings, Settings
from service.start_progress import StartProgress, shown_progress
from service.supervisor import EngineStartError
from speculation.log_format import is_console

FAREWELL_SECONDS = 2.0
"""How long clients that are cut off have to read the error, and then an idle engine to exit."""

_log = structlog.get_logger("forerun.server")


async def serve(settings: Settings, announce: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT; the exit status. A second signal ends it at once.

    `announce` is given what a user should read when the service is ready.
    """
    configure_logs(settings.engine.log_level, settings.engine.log_format)
    try:
        asyncio.get_running_loop().set_exception_handler(handle_loop_errors)
        raise_file_limit()
        keep_heap_small()
        tls_context(settings.server)  # so that files that cannot be used are named before anything starts
        app = create_app(settings)
        runner = create_runner(app)
        await runner.setup()
    except ValueError as error:
        _log.error("cannot serve", reason=str(error))
        return 1
    stop = asyncio.Event()
    try:
        try:
            await listen(runner, settings.server.host, settings.server.port)
        except OSError as error:
            _log.error("cannot listen", host=settings.server.host, port=settings.server.port, reason=str(error))
            return 1
        _handle_signals(stop)
        _log.info("listening", url=url_of(runner), phase="loading")
        if (warning := exposure_warning(settings)) is not None:
            _log.warning("listening beyond this machine without API keys", reason=warning)
        async with AsyncExitStack() as stack:
            progress = None
            if is_console(settings.engine.log_format) and sys.stderr.isatty():
                progress = await stack.enter_async_context(
                    shown_progress(app[ENGINES].supervisors.values(), sys.stderr)
                )
            return await _until_stopped(app, url_of(runner), stop, announce, progress)
    finally:
        await runner.cleanup()


def create_runner(app: web.Application) -> web.AppRunner:
    """What runs the application: a client that leaves cancels its handler, and logs are our own."""
    return web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)


async def listen(runner: web.AppRunner, host: str, port: int) -> ConnectionTable:
    """Accept clients for a runner that was set up. Raises OSError if it cannot listen there."""
    front = runner.app[FRONT]
    server, pool = front.settings.server, front.settings.pool
    most = connection_limit(server, pool.engines)
    table = ConnectionTable(server, most, asyncio.get_running_loop(), front.settings.limits.max_pending_bytes)
    front.metrics.registry.register(ConnectionCollector(table))
    site = ClientSite(runner, host, port, table, tls=tls_context(server), handshake_seconds=server.header_seconds)
    await site.start()
    return table


async def _until_stopped(
    app: web.Application,
    url: str,
    stop: asyncio.Event,
    announce: Callable[[str], None],
    progress: StartProgress | None,
) -> int:
    front, engine = app[FRONT], app[ENGINE_LIFE]
    waits = {"stop": asyncio.create_task(stop.wait()), "ready": asyncio.create_task(front.became_ready.wait())}
    try:
        done, _ = await asyncio.wait({*waits.values(), engine}, return_when=asyncio.FIRST_COMPLETED)
        if waits["ready"] in done:
            if progress is not None:
                progress.stop()
            announce(greeting(front, url))
            await asyncio.wait({waits["stop"], engine}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits.values():
            wait.cancel()
    if engine.done():
        return _report(engine)
    seconds = front.settings.server.shutdown_seconds
    _log.info("shutting down", seconds=seconds)
    if not await front.admission.drain(seconds):
        _log.warning("requests are cut off", num_live=front.client.num_live)
        front.client.end_all(EngineUnavailableError("the service is shutting down", "shutting_down"))
        await front.admission.drain(FAREWELL_SECONDS)
    app[ENGINES].drain()
    await asyncio.wait({engine}, timeout=FAREWELL_SECONDS)
    return 0


def _report(engine: asyncio.Task[None]) -> int:
    """Why the engine is gone although nobody asked."""
    error = None if engine.cancelled() else engine.exception()
    if isinstance(error, EngineStartError):
        _log.error("cannot serve", reason=str(error))
    else:
        _log.error("the engine's supervision ended", exc_info=error)
    return 1


def _handle_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            sys.exit(1)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(NotImplementedError):
            loop.add_signal_handler(number, on_signal)


def url_of(runner: web.AppRunner) -> str:
    """Where the service can be reached from this machine."""
    host, port = runner.addresses[0][:2]
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104 - compared
    scheme = "http" if runner.app[FRONT].settings.server.server_cert is None else "https"
    return f"{scheme}://{name}:{port}"


def _no_password() -> str:
    """Called for an encrypted key, which OpenSSL would otherwise ask the terminal about. Raises OSError."""
    raise OSError("the key is encrypted; it must be readable without a password")


def tls_context(server: ServerSettings) -> ssl.SSLContext | None:
    """What HTTPS needs; None for HTTP. Raises ValueError, naming the setting, for files that cannot be used."""
    if server.server_cert is None and server.server_key is None:
        return None
    if server.server_cert is None or server.server_key is None:
        missing = "server_cert" if server.server_cert is None else "server_key"
        raise ValueError(f"{missing} is missing: HTTPS needs server_cert and server_key")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    cert, key = (Path(file).expanduser() for file in (server.server_cert, server.server_key))
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"server_cert {cert} or server_key {key} cannot be used: {error}") from error
    return context


def greeting(front: Front, url: str) -> str:
    """Where the service is, with one command to try."""
    key = ' -H "Authorization: Bearer $FORERUN_API_KEY"' if front.tenants.has_keys else ""
    body = '{"messages": [{"role": "user", "content": "Name three primary colours."}], "max_tokens": 64}'
    warning = exposure_warning(front.settings)
    return (
        f"\nforerun serves {front.model.name} at {url}\n({front.model.ready.description})\n\n"
        + (f"Other machines can reach it, and it asks for no keys: {warning}.\n\n" if warning is not None else "")
        + "Try it in a browser, or:\n\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n    -d '{body}'\n"
    )


def exposure_warning(settings: Settings) -> str | None:
    """What an operator should know of a service that other machines can reach and that asks for no keys."""
    if settings.tenants.api_keys_file is not None or is_loopback(settings.server.host):
        return None
    if settings.tenants.tenant_header is not None or settings.tenants.operator_header is not None:
        return "headers say who asks: let nobody but the trusted proxy reach the port, or set --api-keys-file"
    return (
        "whoever reaches the port may generate, read metrics, the audit and what tenants cache, make and promote "
        "experiments, change the default profile and drain engines; set --api-keys-file, or listen on 127.0.0.1"
    )
