"""The benchmark of the metadata store measures what it says it measures."""

from __future__ import annotations

from benchmarks.store_path import Ratio, time_lookups
from tests.redis_server import RedisServer


async def test_look_ups_are_timed_one_by_one(shared_redis: RedisServer) -> None:
    """As many times as look-ups were asked for, against a real Redis."""
    taken, hashing = await time_lookups(shared_redis.url, num_tokens=400, num_engines=3, repetitions=7)
    assert len(taken) == 7
    assert min(*taken, hashing) > 0


def test_stores_are_compared_round_by_round() -> None:
    """A machine that is twice as slow in some rounds does not look like a slow store."""
    base = [100.0, 50.0, 100.0, 50.0, 100.0]
    ratio = Ratio.of([99.0, 51.0, 100.0, 50.0, 98.0], base)
    assert (ratio.median, ratio.low, ratio.high) == (1.0, 0.99, 1.0)
