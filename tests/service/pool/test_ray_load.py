"""Engines that Ray places, killed under load."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from service.pool.settings import PoolSettings
from tests.service.conftest import StartService
from tests.service.pool.test_failover import ask, body
from tests.service.pool.test_ray import cluster, driver_pid, pids_of, pool, until_serving

__all__ = ["cluster", "pool"]

STREAMS = 20


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_streams_outlive_an_actor_and_the_driver(start_service: StartService, pool: PoolSettings) -> None:
    """One of two actors is killed under 20 streams, then the driver under 20 more: all bring the same tokens."""
    service = await start_service(pool=pool, wait=False)
    engines = await until_serving(service)
    requests = [body(number, max_tokens=200) for number in range(STREAMS)]
    undisturbed = await asyncio.gather(*(ask(service, request) for request in requests))
    for victim in (pids_of({min(engines)})[0], driver_pid()):
        asking = asyncio.gather(*(ask(service, request) for request in requests))
        await service.until(lambda: service.front.client.num_live == STREAMS)
        os.kill(victim, signal.SIGKILL)
        assert await asking == undisturbed
        await until_serving(service)
    await service.until_idle()
