"""What who keeps an engine alive tells the store of it, and tells it of the pool."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator

import msgspec
import pytest

from cache_store.block_publisher import BlockPublisher
from cache_store.guarded_store import GuardedStore
from cache_store.metadata import PrefixUse, Retention
from cache_store.store_health import StoreHealth
from service.pool import reporter
from service.pool.reporter import Reporter
from service.pool.statistics import NOTHING
from service.pool.store import PoolStore
from speculation.messages import BlocksChanged, Prefer
from tests.service.pool.conftest import READY, Pool, make_pool, submit


@pytest.fixture
async def reported(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pool]:
    """A pool whose only engine is reported of."""
    monkeypatch.setattr(reporter, "ADVICE_SECONDS", 0.01)
    pool = make_pool(1)
    (engine,) = pool.engines
    health = StoreHealth()
    store = PoolStore(pool.store, health, GuardedStore(pool.store, health), Retention())
    follower = Reporter(engine.member, pool.prefixes, store, warm_seconds=0.0, warm_prefixes=1)
    engine.member.observer = follower
    engine.die()
    engine.serve()
    yield pool
    await follower.close()


def num_publishers() -> int:
    gc.collect()
    return sum(type(each) is BlockPublisher for each in gc.get_objects())  # isinstance would wake lazy objects


async def test_the_store_hears_what_an_engine_is_like(reported: Pool) -> None:
    """Its load, its rates and how many blocks it holds are in its heartbeat; when it ends it is gone at once."""
    (engine,) = reported.engines
    hashes = reported.prefixes.hashes(READY, submit("x", prompt=list(range(100))))
    engine.member.dispatch(BlocksChanged(hashes, []))
    engine.member.dispatch(BlocksChanged([], hashes[4:5]))
    engine.member.dispatch(
        msgspec.structs.replace(NOTHING, num_running=3, blocks_free=7, prefill_tokens_per_second=11.0)
    )
    async with asyncio.timeout(30):
        while not (found := [status for status in await reported.store.engines() if status.blocks_held]):
            await asyncio.sleep(0.01)
        (status,) = found
        assert (status.model_fingerprint, status.num_blocks) == ("f", 100)
        assert (status.num_running, status.blocks_free, status.prefill_tokens_per_second) == (3, 7, 11.0)
        assert status.blocks_held == len(hashes) - 1 == reported.prefixes.num_held(engine.member)
        while await reported.store.lookup(hashes, ["engine-0"]) != {"engine-0": 4}:
            await asyncio.sleep(0.01)
        engine.die()
        while await reported.store.engines() or await reported.store.lookup(hashes, ["engine-0"]) != {"engine-0": 0}:
            await asyncio.sleep(0.01)


async def test_an_engine_is_told_what_the_whole_pool_is_asked_for(reported: Pool) -> None:
    """The hottest prefixes come first, so that an engine that was never asked for them keeps what it has of them."""
    (engine,) = reported.engines
    cold, hot = b"c" * 16, b"h" * 16
    await reported.store.record([PrefixUse(block_hash=each, num_tokens=16) for each in (cold, hot, hot)])
    async with asyncio.timeout(30):
        while Prefer([hot, cold]) not in engine.sent:
            await asyncio.sleep(0.01)


async def test_past_lives_are_let_go(reported: Pool) -> None:
    """However often an engine dies, what was kept for its earlier lives is freed."""
    (engine,) = reported.engines
    num_before = num_publishers()
    async with asyncio.timeout(30):
        for _ in range(5):
            while not await reported.store.engines():
                await asyncio.sleep(0.01)
            engine.die()
            while await reported.store.engines():
                await asyncio.sleep(0.01)
            engine.serve()
    assert num_publishers() <= num_before + 1
