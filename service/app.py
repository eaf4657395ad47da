"""The application: routes, and resources that are opened and closed side by side."""

from __future__ import annotations

import asyncio
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress

import msgspec
from aiohttp import web

from service import audit_routes
from service.background import start_task
from service.context import (
    FRONT,
    HOSTS,
    PROXIES,
    add_fixed_headers,
    add_request_id,
    allowed_hosts_only,
    openai_errors,
    own_pages_only,
    request_context,
)
from service.cross_origin import ORIGINS, AllowedOrigins, add_origin_headers, preflight
from service.documents import routes as document_routes
from service.experiments import handlers as experiment_routes
from service.front import Front
from service.generation_routes import chat_completions, completions
from service.hosts import AllowedHosts
from service.page import routes as page_routes
from service.peers import TrustedProxies
from service.pool.devices import Place, place_engines
from service.pool.discovery import Discovery
from service.pool.local import LocalEngine, LocalEngines
from service.pool.member import Member
from service.pool.ray_engines import RayEngines
from service.pool.remote import RemoteEngine
from service.pool.routes import cache, drain
from service.pool.routes import engines as list_engines
from service.pool.security import Security
from service.pool.store import MEMORY
from service.request_log import RequestLog
from service.served_model import MAX_BODY_BYTES
from service.service_routes import live, metrics, model, models, ready, version
from service.settings import Settings
from service.supervisor import EngineStartError
from service.tenants import TENANTS, only_who_may
from service.tokenizer_routes import detokenize, tokenize, tokenizer_info
from service.websocket import SOCKETS, close_sockets, stream

ENGINES = web.AppKey("engines", LocalEngines)
ENGINE_COMMAND = web.AppKey[Callable[[str], Sequence[str]]]("engine_command")
"""Of an engine on a device."""
SECURITY = web.AppKey("security", Security)
RAY = web.AppKey[RayEngines | None]("ray")
"""What has Ray run the engines, if it is to."""
PLACES = web.AppKey[Sequence[Place]]("places")
"""Where each engine runs."""
ENGINE_LIFE = web.AppKey[asyncio.Task[None]]("engine_life")
"""Ends when every engine is gone for good: after a drain, or with `EngineStartError`."""


def create_app(settings: Settings, engine_command: Sequence[str] | None = None) -> web.Application:
    """The service as an aiohttp application. `engine_command` replaces the engine, for tests.

    Raises ValueError for settings that name something that is not there or cannot be used.
    """
    app = web.Application(
        middlewares=[request_context, openai_errors, allowed_hosts_only, preflight, own_pages_only, only_who_may],
        client_max_size=settings.limits.max_body_bytes or MAX_BODY_BYTES,
    )
    app[FRONT] = Front(settings)
    app[TENANTS] = app[FRONT].tenants
    # No page of others can know a key: where keys are asked for, it does not matter under which name.
    hosts = AllowedHosts([*filter(None, [settings.server.host]), *settings.server.allowed_hosts])
    app[PROXIES] = TrustedProxies(settings.server.trusted_proxies)
    app[ORIGINS] = AllowedOrigins(settings.server.allowed_origins)
    app[HOSTS] = None if app[TENANTS].has_keys else hosts
    app[SOCKETS] = set()
    app[SECURITY] = Security.load(settings.pool)
    app[RAY] = RayEngines(settings, engine_command) if settings.pool.ray is not None else None
    num_local = settings.pool.engines if settings.pool.ray is None else 0
    app[PLACES] = place_engines(settings.engine.device, num_local)
    app[ENGINE_COMMAND] = lambda device: engine_command or default_engine_command(settings, device)
    app.add_routes(
        [
            web.post("/v1/chat/completions", chat_completions),
            web.post("/v1/completions", completions),
            web.get("/v1/stream", stream),
            web.get("/v1/models", models),
            web.get("/v1/models/{name:.+}", model),
            web.get("/v1/cache", cache),
            web.get("/v1/engines", list_engines),
            web.post("/v1/engines/{id}/drain", drain),
            web.get("/health/live", live),
            *(web.get(path, ready) for path in ("/health/ready", "/health", "/v1/health", "/ping")),
            web.post("/ping", ready),
            web.get("/version", version),
            web.post("/tokenize", tokenize),
            web.post("/detokenize", detokenize),
            web.get("/tokenizer_info", tokenizer_info),
            web.get("/metrics", metrics),
        ]
    )
    audit_routes.setup(app, app[FRONT].auditor)
    experiment_routes.setup(app, app[FRONT].experiments)
    page_routes.setup(app)
    document_routes.setup(app)
    app.on_response_prepare.extend([add_fixed_headers, add_request_id, add_origin_headers])
    app.on_shutdown.append(close_sockets)
    app.cleanup_ctx.extend([request_log, engines])
    return app


def default_engine_command(settings: Settings, device: str) -> list[str]:
    """How an engine is started; the socket is added by who starts it."""
    engine = msgspec.structs.replace(settings.engine, device=device)
    return [sys.executable, "-m", "speculation.worker", "--settings", msgspec.json.encode(engine).decode()]


async def request_log(app: web.Application) -> AsyncIterator[None]:
    """Where finished requests are recorded, if asked for. Raises ValueError if that cannot be written."""
    front, settings = app[FRONT], app[FRONT].settings.recording
    if settings.request_log is None:
        yield
        return
    log = front.request_log = RequestLog(settings.request_log, settings.request_log_bytes)
    yield
    front.request_log = None
    await asyncio.to_thread(log.close)


async def engines(app: web.Application) -> AsyncIterator[None]:
    """The engines, from start to end: what starts them again, and the task that runs it."""
    front, settings = app[FRONT], app[FRONT].settings
    places = app[PLACES]
    # Within a store that others share, a name that is nobody else's.
    is_alone = settings.pool.store == MEMORY
    name = "engine" if is_alone else f"{socket.gethostname()}-{secrets.token_hex(3)}"
    local = app[ENGINES] = LocalEngines(
        [
            LocalEngine(f"{name}-{index}", app[ENGINE_COMMAND](place.device), place.cores)
            for index, place in enumerate(places)
        ],
        front.client,
        front.prefixes,
        front.store,
        on_ready=front.load,
        on_lost=front.lose,
        load_seconds=settings.server.load_seconds,
        restart_seconds=settings.server.restart_seconds,
        silence_seconds=settings.pool.silence_seconds,
        warm_seconds=settings.pool.warm_seconds,
        warm_prefixes=settings.pool.warm_prefixes,
    )
    beside = [
        start_task("waiting sequences", front.client.run()),
        start_task("popular prefixes", front.popularity.run()),
    ]
    if not is_alone:
        beside.append(start_task("engines in the store", discovery(app).run()))
    task = app[ENGINE_LIFE] = asyncio.create_task(life(local, app[RAY]), name="engines")
    yield
    for each in (task, *beside):
        each.cancel()
        with suppress(asyncio.CancelledError, Exception):  # whoever awaited it before has reported its error
            await each
    await front.large_requests.close()
    await front.store.store.close()


async def life(local: LocalEngines, ray: RayEngines | None) -> None:
    """All engines that this front is to start, until they are drained. Raises `EngineStartError` if none can be."""
    if ray is None:
        await local.run()
        return
    tasks = [asyncio.create_task(each.run(), name="engines") for each in (ray, local)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    except ValueError as error:
        raise EngineStartError(str(error)) from error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def discovery(app: web.Application) -> Discovery:
    """What finds stand-alone engines and connects them."""
    front, settings = app[FRONT], app[FRONT].settings

    def connect(member: Member) -> RemoteEngine:
        return RemoteEngine(
            member,
            app[SECURITY],
            on_ready=front.load,
            on_lost=front.lose,
            silence_seconds=settings.pool.silence_seconds,
            load_seconds=settings.server.load_seconds,
        )

    return Discovery(front.client, front.store, connect=connect, served_fingerprint=lambda: front.fingerprint)
