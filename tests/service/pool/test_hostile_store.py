"""What others have written into the store: hostile announcements and hot prefixes end nothing and hide nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from cache_store.guarded_store import GuardedStore
from cache_store.memory_store import MemoryStore
from cache_store.metadata import EngineStatus, HotPrefix, Retention
from cache_store.store_health import StoreHealth
from service.pool import discovery as discoveries
from service.pool.address import Address
from service.pool.discovery import Discovery
from service.pool.member import Member
from service.pool.reporter import Reporter
from service.pool.store import PoolStore
from service.pool.warm_start import warm
from speculation.messages import Rejected
from tests.service.pool.conftest import Pool, make_pool, output
from tests.service.pool.test_warm_start import hot


class Connection:
    """A connection that is parsed and never made."""

    def __init__(self, member: Member) -> None:
        Address.parse(member.address, "address")

    async def run(self) -> None:
        await asyncio.sleep(60)


def pool_store(pool: Pool) -> PoolStore:
    health = StoreHealth()
    return PoolStore(pool.store, health, GuardedStore(pool.store, health), Retention())


def status(engine_id: str, address: str) -> EngineStatus:
    return EngineStatus(engine_id=engine_id, instance="1", address=address, model_fingerprint="f")


async def test_hostile_announcements_hide_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address that is none, or the id of an engine of this front's own: logged once; the next one is connected."""
    monkeypatch.setattr(discoveries, "LOOK_SECONDS", 0.01)
    pool = make_pool(1)
    for engine_id, address in (
        ("a", "tcp://nowhere:99999999"),
        ("b", "tcp://"),
        ("engine-0", "tcp://127.0.0.1:1"),
        ("z", "tcp://127.0.0.1:2"),
    ):
        await pool.store.announce(status(engine_id, address))
    connect: Any = Connection
    following = Discovery(pool.pool, pool_store(pool), connect=connect, served_fingerprint=lambda: "f")
    with capture_logs() as logs:
        task = asyncio.create_task(following.run())
        async with asyncio.timeout(20):
            while "z" not in pool.pool.members:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert set(pool.pool.members) == {"engine-0", "z"}
        assert pool.engines[0].member.is_serving
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert sorted(entry["engine"] for entry in logs) == ["a", "b", "engine-0"]


async def test_hot_prefixes_that_are_none_are_left_out() -> None:
    """Token ids that no model has, and a prefix that the engine refuses: the others are computed all the same."""
    pool = make_pool(1)
    (engine,) = pool.engines
    prefixes = [
        HotPrefix(block_hash=b"x" * 16, num_tokens=16, uses=9.0, token_ids=tuple(range(-16, 0))),
        HotPrefix(block_hash=b"x" * 16, num_tokens=0, uses=9.0, token_ids=()),
        hot(list(range(32))),
        hot(list(range(48))),
    ]
    warming = asyncio.create_task(warm(engine.member, prefixes, 10.0))
    while not engine.submitted:
        await asyncio.sleep(0)
    refused = engine.submitted[0].request_id
    engine.member.dispatch(Rejected(request_id=refused, code="invalid", message="too long"))
    while len(engine.submitted) < 2:
        await asyncio.sleep(0)
    engine.say(output(engine.submitted[1].request_id, 1, finish="length"))
    assert await warming == 1
    assert engine.member.flights == {}


class HostileStore(MemoryStore):
    """Raises what no store should when it is asked for hot prefixes or told of an engine."""

    async def hot_prefixes(self, limit: int) -> list[HotPrefix]:
        raise RuntimeError("a mistake")

    async def announce(self, status: EngineStatus) -> int | None:
        if not hasattr(self, "was_asked"):
            self.was_asked = True
            raise RuntimeError("a mistake")
        return await super().announce(status)


async def test_an_engine_serves_and_is_announced_whatever_the_store_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm start that cannot even begin ends, and reports to the store go on behind an error of their own."""
    monkeypatch.setattr("service.pool.reporter.PUBLISHER_PAUSE_SECONDS", 0.01)
    pool = make_pool(1)
    (engine,) = pool.engines
    pool.store = HostileStore()
    follower = Reporter(engine.member, pool.prefixes, pool_store(pool), warm_seconds=5.0, warm_prefixes=1)
    engine.member.observer = follower
    engine.die()
    engine.serve()
    assert engine.member.state == "warming"
    async with asyncio.timeout(20):
        await engine.member.opened.wait()
        while not await pool.store.engines():
            await asyncio.sleep(0.01)
    await follower.close()
