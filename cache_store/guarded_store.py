"""The metadata store as those see it who serve requests: it may know nothing, but it never fails and never blocks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from cache_store.metadata import EngineStatus, HotPrefix, MetadataStore, PrefixUse, StoreUnavailable
from cache_store.store_health import StoreHealth

_T = TypeVar("_T")


class GuardedStore:
    """Answers what the store answers, or at once what a caller without a store can go on with.

    A request waits for the store at most once, for one timeout, and for a store known to be down not at all.
    """

    def __init__(self, store: MetadataStore, health: StoreHealth) -> None:
        self._store = store
        self._health = health

    async def engines(self) -> list[EngineStatus] | None:
        """See `MetadataStore`; None if not known. Called at intervals, this is what notices that the store is back."""
        if not self._health.may_try:
            return None
        found = await self._ask(self._store.engines, None)
        if found is not None:
            self._health.succeeded()
        return found

    async def lookup(self, hashes: Sequence[bytes], engine_ids: Sequence[str]) -> dict[str, int] | None:
        """See `MetadataStore`; None if not known."""
        return await self._ask(lambda: self._store.lookup(hashes, engine_ids), None) if self._health.is_up else None

    async def record(self, uses: Sequence[PrefixUse]) -> None:
        """See `MetadataStore`; uses are lost while the store is down."""
        if self._health.is_up:
            await self._ask(lambda: self._store.record(uses), None)

    async def hot_prefixes(self, limit: int) -> list[HotPrefix]:
        """See `MetadataStore`; none if not known."""
        return await self._ask(lambda: self._store.hot_prefixes(limit), []) if self._health.is_up else []

    async def _ask(self, question: Callable[[], Awaitable[_T]], otherwise: _T) -> _T:
        try:
            return await question()
        except StoreUnavailable as error:
            self._health.failed(error)
        except Exception as error:  # noqa: BLE001 - a request goes on without hints, whatever is wrong with them
            self._health.failed(StoreUnavailable(f"{type(error).__name__}: {error}"))
        return otherwise
