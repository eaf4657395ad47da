"""GET /v1/audit, and how an application gets its audit: `setup(app, auditor)`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from aiohttp import web

from service.audit import Auditor
from service.background import start_task
from service.service_routes import json_response

AUDITOR = web.AppKey("auditor", Auditor)


def setup(app: web.Application, auditor: Auditor) -> None:
    """Add the route, and keep the audit running while the application does."""
    app[AUDITOR] = auditor
    app.cleanup_ctx.append(_running)
    app.add_routes([web.get("/v1/audit", audit)])


async def audit(request: web.Request) -> web.Response:
    return json_response(request.app[AUDITOR].report)


async def _running(app: web.Application) -> AsyncIterator[None]:
    task = start_task("audit", app[AUDITOR].run())
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
