"""Several fronts that share a Redis, and a Redis that is away."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable

import pytest
from structlog.testing import capture_logs

from service.errors import ApiError
from service.experiments import manager as managers
from service.experiments.manager import Experiments
from service.experiments.redis_store import RedisExperimentStore
from speculation.messages import NgramConfig, NoSpeculation
from tests.redis_server import RedisServer
from tests.service.experiments.test_manager import drive, front, look
from tests.service.experiments.traffic import Law, definition, facts


@pytest.fixture
async def pair(shared_redis: RedisServer) -> AsyncIterator[list[Experiments]]:
    """Two fronts on one Redis."""
    namespace = uuid.uuid4().hex
    stores = [RedisExperimentStore(shared_redis.url, namespace=namespace) for _ in range(2)]
    yield [front(store) for store in stores]
    for store in stores:
        await store.close()


async def test_two_fronts_on_one_redis_are_one_service(pair: list[Experiments]) -> None:
    """A change on one is known to the other after its next exchange; both assign alike and report the same numbers."""
    one, two = pair
    await one.put_profile("fast", NgramConfig(), is_default=True)
    await one.create(definition())
    await look(one, two)
    assert two.default == NgramConfig()
    same = [(a and a.arm, b and b.arm) for a, b in ((one.assign(facts(n)), two.assign(facts(n))) for n in range(100))]
    assert all(a == b for a, b in same)
    law = Law(1, (1.0, 0.7))
    for part in range(10):
        drive(pair[part % 2], law, 100, first=100 * part)
    await look(one, two)
    reports = [await each.report("lookup") for each in pair]
    assert reports[0] == reports[1]
    assert reports[0].num_samples == 1000
    assert [each.book.experiments["lookup"].status for each in pair] == ["stopped", "stopped"]


async def test_a_killed_front_loses_only_what_it_had_not_handed_over(pair: list[Experiments]) -> None:
    """What was flushed before it died is in the report, what came after is not, and another front goes on."""
    one, two = pair
    await one.create(definition())
    await look(one, two)
    drive(one, Law(1), 200)
    await one._share()
    drive(one, Law(2), 50, first=200)  # and here it is killed
    drive(two, Law(3), 100, first=250)
    assert (await two.report("lookup")).num_samples == 300


async def test_without_redis_requests_go_on(start_redis: Callable[..., RedisServer]) -> None:
    """While the store is away assignments go on and outcomes gather; when it is back, empty, nothing is missing but
    what was in its memory.
    """
    server = start_redis()
    experiments = front(RedisExperimentStore(server.url, timeout_seconds=0.3))
    await experiments.put_profile("fast", NgramConfig(), is_default=True)
    await experiments.create(definition())
    server.kill()
    drive(experiments, Law(1), 100)
    await look(experiments)
    drive(experiments, Law(2), 100, first=100)
    await look(experiments)
    with pytest.raises(ApiError) as caught:
        await experiments.put_profile("slow", NoSpeculation())
    assert caught.value.status == 503
    assert experiments.default == NgramConfig()
    server.start()
    await look(experiments)
    await look(experiments)
    assert (await experiments.report("lookup")).num_samples == 200
    assert experiments.default == NgramConfig()
    await experiments._store.close()


async def test_a_full_redis_is_one_outage(start_redis: Callable[..., RedisServer]) -> None:
    """What is only read still comes, and yet it is away until it takes writes again; then nothing is missing."""
    server = start_redis()
    experiments = front(RedisExperimentStore(server.url, timeout_seconds=5.0))
    await experiments.create(definition())
    await look(experiments)
    with capture_logs() as logs:
        server.command("CONFIG", "SET", "maxmemory", "1")
        for _ in range(3):
            await look(experiments)
        drive(experiments, Law(1), 100)
        for _ in range(3):
            await look(experiments)
        server.command("CONFIG", "SET", "maxmemory", "0")
        await look(experiments)
    assert [entry["event"] for entry in logs] == ["experiment store away", "experiment store back"]
    assert (await experiments.report("lookup")).num_samples == 100
    await experiments._store.close()


async def test_running_shares_within_a_second(monkeypatch: pytest.MonkeyPatch, shared_redis: RedisServer) -> None:
    """Two running fronts exchange without being told to, and what is left at the end is handed over."""
    assert managers.FLUSH_SECONDS <= 1.0
    monkeypatch.setattr(managers, "FLUSH_SECONDS", 0.02)
    monkeypatch.setattr(managers, "EVALUATION_SECONDS", 0.05)
    namespace = uuid.uuid4().hex
    one, two = (front(RedisExperimentStore(shared_redis.url, namespace=namespace)) for _ in range(2))
    async with two.running():
        async with one.running():
            await one.create(definition())
            drive(one, Law(1, (1.0, 0.7)), 100)
        async with asyncio.timeout(10):
            while (await two.report("lookup")).num_samples < 100:
                await asyncio.sleep(0.02)
            drive(two, Law(2, (1.0, 0.7)), 1500, first=100)
            while two.book.experiments["lookup"].status == "running":
                await asyncio.sleep(0.02)
