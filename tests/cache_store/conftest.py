"""Stores of both kinds, for tests of what they have in common."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable

import pytest

from cache_store.memory_store import MemoryStore
from cache_store.metadata import MetadataStore, Retention
from cache_store.redis_store import RedisStore
from tests.redis_server import RedisServer

PATIENT = 20.0
"""Seconds to wait for a server that shares two cores with everything else."""

LASTING = Retention(ttl_seconds=600.0, max_hot_prefixes=4, max_hot_tokens=64)


@pytest.fixture(params=["memory", "redis"])
async def open_store(request: pytest.FixtureRequest) -> AsyncIterator[Callable[[Retention], MetadataStore]]:
    """Makes an empty store of each kind."""
    stores: list[MetadataStore] = []

    def open_one(retention: Retention) -> MetadataStore:
        if request.param == "memory":
            stores.append(MemoryStore(retention))
        else:
            server: RedisServer = request.getfixturevalue("shared_redis")
            stores.append(
                RedisStore(server.url, namespace=secrets.token_hex(8), retention=retention, timeout_seconds=PATIENT)
            )
        return stores[-1]

    yield open_one
    for store in stores:
        await store.close()


@pytest.fixture
def store(open_store: Callable[[Retention], MetadataStore]) -> MetadataStore:
    """An empty store that forgets nothing while a test runs."""
    return open_store(LASTING)
