"""The application: routes, and resources that are opened and closed side by side."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

import msgspec
from aiohttp import web

from service.context import FRONT, add_request_id, openai_errors, request_context
from service.experiments import handlers as experiment_routes
from service.front import Front
from service.generation_routes import chat_completions, completions
from service.service_routes import live, metrics, model, models, ready
from service.settings import Settings
from service.supervisor import Supervisor
from service.websocket import SOCKETS, close_sockets, stream

SUPERVISOR = web.AppKey("supervisor", Supervisor)
ENGINE_COMMAND = web.AppKey[Sequence[str]]("engine_command")
ENGINE_LIFE = web.AppKey[asyncio.Task[None]]("engine_life")
"""Ends when the engine is gone for good: after a drain, or with `EngineStartError`."""


def create_app(settings: Settings, engine_command: Sequence[str] | None = None) -> web.Application:
    """The service as an aiohttp application. `engine_command` replaces the engine, for tests."""
    app = web.Application(middlewares=[request_context, openai_errors], client_max_size=settings.limits.max_body_bytes)
    app[FRONT] = Front(settings)
    app[SOCKETS] = set()
    app[ENGINE_COMMAND] = tuple(engine_command or default_engine_command(settings))
    app.add_routes(
        [
            web.post("/v1/chat/completions", chat_completions),
            web.post("/v1/completions", completions),
            web.get("/v1/stream", stream),
            web.get("/v1/models", models),
            web.get("/v1/models/{name:.+}", model),
            web.get("/health/live", live),
            web.get("/health/ready", ready),
            web.get("/metrics", metrics),
        ]
    )
    experiment_routes.setup(app, app[FRONT].experiments)
    app.on_response_prepare.append(add_request_id)
    app.on_shutdown.append(close_sockets)
    app.cleanup_ctx.append(engine)
    return app


def default_engine_command(settings: Settings) -> list[str]:
    """How an engine is started; the socket is added by who starts it."""
    return [sys.executable, "-m", "speculation.worker", "--settings", msgspec.json.encode(settings.engine).decode()]


async def engine(app: web.Application) -> AsyncIterator[None]:
    """The engine, from start to end: a supervisor, and the task that runs it."""
    front, server = app[FRONT], app[FRONT].settings.server
    supervisor = app[SUPERVISOR] = Supervisor(
        app[ENGINE_COMMAND],
        front.client,
        on_ready=front.load,
        on_lost=front.lose,
        load_seconds=server.load_seconds,
        restart_seconds=server.restart_seconds,
    )
    task = app[ENGINE_LIFE] = asyncio.create_task(supervisor.run(), name="engine")
    yield
    task.cancel()
    with suppress(asyncio.CancelledError, Exception):  # whoever awaited it before has reported its error
        await task
