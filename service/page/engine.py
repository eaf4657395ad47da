"""GET /v1/engine: what is served, and the engines' latest numbers, as JSON."""

from __future__ import annotations

import msgspec
from aiohttp import web

from service.context import FRONT
from service.errors import ApiError
from service.front import Front
from service.recent_requests import RecentRequest
from service.service_routes import json_response
from speculation.messages import STEP_SECONDS_BOUNDS, Stats


class EngineModel(msgspec.Struct, frozen=True, kw_only=True):
    """What is served, and with what; each engine is the same."""

    name: str
    description: str
    """Device, precision and which path runs."""
    context_length: int
    num_blocks: int
    block_size: int
    methods: list[str]
    """Speculation methods it has."""
    max_running: int
    """Most sequences in the batches of all engines that serve."""
    max_waiting: int
    """Most sequences in an engine's queue."""


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /v1/engine. The page is to show something while the engine loads, so this route never fails."""

    is_ready: bool
    num_live: int
    """Sequences that clients wait for, whether the engine has told of them yet or not."""
    model: EngineModel | None
    """None until the first engine has loaded it."""
    stats: Stats | None
    """Of all engines together, over their restarts; None until one has worked."""
    step_seconds_bounds: tuple[float, ...] = STEP_SECONDS_BOUNDS
    """Upper ends of the buckets in `stats`."""
    requests: list[RecentRequest]
    """The latest that this front answered, newest first."""


async def engine_view(request: web.Request) -> web.Response:
    front = request.app[FRONT]
    view = EngineView(
        is_ready=front.is_ready,
        num_live=front.client.num_live,
        model=_model_of(front),
        stats=front.metrics.engine.stats,
        requests=list(front.recent),
    )
    return json_response(view)


def _model_of(front: Front) -> EngineModel | None:
    try:
        model = front.model
    except ApiError:
        return None
    ready = model.ready
    return EngineModel(
        name=model.name,
        description=ready.description,
        context_length=model.context_length,
        num_blocks=ready.num_blocks,
        block_size=ready.block_size,
        methods=sorted(ready.methods),
        max_running=front.settings.engine.max_num_seqs * max(len(front.client.serving), 1),
        max_waiting=ready.max_waiting,
    )
