"""The store when the clock of Redis' host is set forward or back by an hour."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from cache_store.metadata import EngineStatus, Retention
from cache_store.redis_store import RedisStore
from service.experiments.redis_store import RedisExperimentStore
from tests.fake_clock import FakeClock, find_library
from tests.redis_server import RedisServer

pytestmark = pytest.mark.skipif(find_library() is None, reason="libfaketime is not installed: apt-get install faketime")

HOUR = 3600
RETENTION = Retention(ttl_seconds=0.5)


@pytest.fixture
def clock(tmp_path: Path) -> FakeClock:
    """The clock of Redis' host."""
    return FakeClock(tmp_path / "offset")


@pytest.fixture
def redis(start_redis: Callable[..., RedisServer], clock: FakeClock) -> RedisServer:
    """A Redis of this test's own, on a host whose clock can be set."""
    return start_redis(environment=clock.environment)


@pytest.fixture
async def store(redis: RedisServer) -> AsyncIterator[RedisStore]:
    """A client of it, to which an engine is gone after half a second."""
    opened = RedisStore(redis.url, retention=RETENTION, timeout_seconds=10.0)
    yield opened
    await opened.close()


def status(engine_id: str) -> EngineStatus:
    return EngineStatus(engine_id=engine_id, instance="1", address="here", model_fingerprint="m")


async def known(store: RedisStore) -> list[str]:
    return [each.engine_id for each in await store.engines()]


@pytest.mark.parametrize("seconds", [HOUR, -HOUR])
async def test_an_engine_that_lives_is_back_with_its_next_heartbeat(
    store: RedisStore, redis: RedisServer, clock: FakeClock, seconds: int
) -> None:
    """An engine is listed again at once when it is announced after a step, and after the step back."""
    await store.announce(status("lives"))
    for offset in (seconds, 0):
        clock.step(offset)
        assert abs(int(redis.command("EVAL", "return redis.call('TIME')[1]", "0")) - time.time() - offset) < 60
        await store.announce(status("lives"))
        assert await known(store) == ["lives"]


@pytest.mark.parametrize("seconds", [HOUR, -HOUR])
async def test_an_engine_that_died_around_a_step_is_forgotten(
    store: RedisStore, clock: FakeClock, seconds: int
) -> None:
    """An engine that fell silent before the step is not listed after it, though another keeps the list alive."""
    await store.announce(status("dead"))
    clock.step(seconds)
    await store.announce(status("lives"))
    assert await known(store) == ["lives"]
    clock.step(0)
    await store.announce(status("later"))
    assert await known(store) == ["later"]


async def test_the_lead_of_a_front_that_is_gone_is_free_although_the_clock_went_back(
    redis: RedisServer, clock: FakeClock
) -> None:
    """A lead taken before the clock went back is free by the new clock, not when the old one is reached again."""
    store = RedisExperimentStore(redis.url, namespace=secrets.token_hex(4), timeout_seconds=10.0)
    try:
        assert await store.lead("gone", 5.0)
        assert not await store.lead("other", 5.0)
        clock.step(-HOUR)
        assert await store.lead("other", 5.0)
        assert not await store.lead("third", 5.0)
        clock.step(0)
        assert await store.lead("third", 5.0)
    finally:
        await store.close()
