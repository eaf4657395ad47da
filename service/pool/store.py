"""The metadata store of a front or a stand-alone engine, as its settings say."""

from __future__ import annotations

from dataclasses import dataclass

from cache_store.guarded_store import GuardedStore
from cache_store.memory_store import MemoryStore
from cache_store.metadata import MetadataStore, Retention
from cache_store.redis_store import RedisStore
from cache_store.store_health import StoreHealth
from service.pool.settings import PoolSettings

MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class PoolStore:
    """One store, what is known of its health, and the view of it that never fails."""

    store: MetadataStore
    health: StoreHealth
    guarded: GuardedStore
    retention: Retention

    @property
    def kind(self) -> str:
        """Either "memory" or "redis"."""
        return MEMORY if isinstance(self.store, MemoryStore) else "redis"

    @property
    def keeps_text(self) -> bool:
        """Whether token ids of hot prefixes are kept."""
        return self.retention.max_hot_prefixes > 0


def open_store(settings: PoolSettings) -> PoolStore:
    """The store that `settings` name, which connects when first used. Raises ValueError for an unreadable address."""
    retention = Retention(max_hot_prefixes=settings.warm_prefixes if settings.warm_seconds else 0)
    store: MetadataStore
    if settings.store == MEMORY:
        store = MemoryStore(retention)
    else:
        store = RedisStore(
            settings.store,
            namespace=settings.namespace,
            retention=retention,
            timeout_seconds=settings.store_timeout,
        )
    health = StoreHealth()
    return PoolStore(store, health, GuardedStore(store, health), retention)
