"""The experiment store that the settings name."""

from __future__ import annotations

from service.experiments.store import ExperimentStore, MemoryExperimentStore
from service.pool.settings import PoolSettings


def open_experiment_store(settings: PoolSettings) -> ExperimentStore:
    """Beside the pool's own, in the same namespace. Connects when first used; ValueError for an unreadable address.

    `store_timeout` is for hints that one can do without; what users change may take longer.
    """
    if settings.store == "memory":
        return MemoryExperimentStore()
    from service.experiments.redis_store import RedisExperimentStore

    return RedisExperimentStore(
        settings.store, namespace=settings.namespace, timeout_seconds=max(1.0, settings.store_timeout)
    )
