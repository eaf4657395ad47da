"""GET /v1/engines, POST /v1/engines/{id}/drain, and GET /v1/cache."""

from __future__ import annotations

import msgspec
from aiohttp import web

from service.context import FRONT
from service.errors import ApiError, did_you_mean, shorten
from service.pool.cache_statistics import CacheUse
from service.pool.member import Member
from service.service_routes import json_response

MOST_HOT_PREFIXES = 50


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One engine, as the front sees it."""

    id: str
    address: str
    """tcp://HOST:PORT, or "local" for one of this front's own."""
    state: str
    """One of "loading" (the first time or again), "warming", "serving", "draining" and "drained"."""
    description: str | None
    """Device, precision and which path runs; null while it does not serve."""
    model_fingerprint: str | None
    deaths: int
    """How often it ended while it served."""
    waiting: int
    running: int
    """Sequences, of all fronts."""
    sequences: int
    """Those of this front."""
    blocks_free: int
    blocks_cached: int
    blocks_in_use: int
    blocks_held: int
    """Blocks that a prefix could be found in, used or not."""
    prefill_tokens_per_second: float
    decode_tokens_per_second: float

    @classmethod
    def of(cls, member: Member, num_held: int) -> EngineInfo:
        stats, ready = member.totals.latest, member.ready
        return cls(
            id=member.engine_id,
            address=member.address,
            state=member.state,
            description=ready.description if ready else None,
            model_fingerprint=ready.model_fingerprint if ready else None,
            deaths=member.num_deaths,
            waiting=stats.num_waiting if stats else 0,
            running=stats.num_running if stats else 0,
            sequences=len(member.flights),
            blocks_free=stats.blocks_free if stats else 0,
            blocks_cached=stats.blocks_cached if stats else 0,
            blocks_in_use=stats.blocks_in_use if stats else 0,
            blocks_held=num_held,
            prefill_tokens_per_second=round(stats.prefill_tokens_per_second, 1) if stats else 0.0,
            decode_tokens_per_second=round(stats.decode_tokens_per_second, 1) if stats else 0.0,
        )


class EngineList(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /v1/engines."""

    object: str = "list"
    data: list[EngineInfo]
    waiting: int
    """Sequences whose engine died, and that wait for one that takes over."""
    resumed: int
    """How often a sequence went on elsewhere."""


async def engines(request: web.Request) -> web.Response:
    front = request.app[FRONT]
    pool = front.client
    found = [EngineInfo.of(member, front.prefixes.num_held(member)) for member in pool.members.values()]
    return json_response(EngineList(data=found, waiting=pool.num_waiting, resumed=pool.num_resumed))


async def drain(request: web.Request) -> web.Response:
    """Let an engine finish what it has; it is given nothing more, and exits. Again is harmless."""
    front, engine_id = request.app[FRONT], request.match_info["id"]
    member = front.client.members.get(engine_id)
    if member is None:
        hint = did_you_mean(engine_id, front.client.members)
        message = f"{shorten(engine_id)} is no engine of this service; {hint}"
        raise ApiError(404, message, param="id", code="engine_not_found")
    member.drain()
    return json_response(EngineInfo.of(member, front.prefixes.num_held(member)), status=202)


class TenantCache(msgspec.Struct, frozen=True, kw_only=True):
    """How much of one tenant's prompts was found in the prefix caches of engines, since this front started."""

    tenant: str
    """Empty where the service knows no tenants."""
    requests: int
    prompt_tokens: int
    cached_tokens: int
    hit_rate: float
    """Cached / prompt tokens."""

    @classmethod
    def of(cls, tenant: str, use: CacheUse) -> TenantCache:
        return cls(
            tenant=tenant,
            requests=use.requests,
            prompt_tokens=use.prompt_tokens,
            cached_tokens=use.cached_tokens,
            hit_rate=round(use.hit_rate, 4),
        )


class HotPrefixInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix that many requests share. What it says is shown to nobody."""

    prefix: str
    """The hash of its last block."""
    num_tokens: int
    uses: float
    """Of late: after ten minutes a use counts half."""


class EngineCache(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine holds."""

    id: str
    blocks_held: int
    blocks_available: int
    blocks_in_use: int


class StoreInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The metadata store."""

    kind: str
    """Either "memory" or "redis"."""
    is_up: bool
    failures: int
    """Calls that it did not answer, since the front started."""


class CacheOverview(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /v1/cache."""

    hit_rate: float
    tenants: list[TenantCache]
    """Who asked last comes last."""
    hot_prefixes: list[HotPrefixInfo]
    engines: list[EngineCache]
    store: StoreInfo


async def cache(request: web.Request) -> web.Response:
    """What is cached, for whom, and how much it helps."""
    front = request.app[FRONT]
    hot = await front.store.guarded.hot_prefixes(MOST_HOT_PREFIXES)
    described = [EngineInfo.of(member, front.prefixes.num_held(member)) for member in front.client.members.values()]
    overview = CacheOverview(
        hit_rate=round(front.cache.total.hit_rate, 4),
        tenants=[TenantCache.of(name, use) for name, use in front.cache.by_tenant.items()],
        hot_prefixes=[
            HotPrefixInfo(prefix=prefix.block_hash.hex(), num_tokens=prefix.num_tokens, uses=round(prefix.uses, 2))
            for prefix in hot
        ],
        engines=[
            EngineCache(
                id=each.id,
                blocks_held=each.blocks_held,
                blocks_available=each.blocks_free + each.blocks_cached,
                blocks_in_use=each.blocks_in_use,
            )
            for each in described
        ],
        store=StoreInfo(
            kind=front.store.kind, is_up=front.store.health.is_up, failures=front.store.health.num_failures
        ),
    )
    return json_response(overview)
