"""Follows an engine that this process keeps alive: warms it up, and tells the store of it."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from cache_store.block_publisher import BlockPublisher
from cache_store.metadata import EngineStatus, StoreUnavailable
from service.background import logged_failures, run_forever, start_task
from service.pool.member import Member
from service.pool.prefixes import Prefixes
from service.pool.store import PoolStore
from service.pool.warm_start import warm
from speculation.messages import BlocksChanged

ADVICE_SECONDS = 2.0
PUBLISHER_PAUSE_SECONDS = 1.0
"""How long reports to the store rest after an error of the service itself."""
MOST_ADVISED = 64


class Reporter:
    """Satisfies `Observer`. Everything it waits for, it waits for beside the engine's events, never in their way."""

    def __init__(
        self, member: Member, prefixes: Prefixes, store: PoolStore, *, warm_seconds: float, warm_prefixes: int
    ) -> None:
        self._member = member
        self._prefixes = prefixes
        self._store = store
        self._warm_seconds = warm_seconds
        self._warm_prefixes = warm_prefixes
        self._publisher: BlockPublisher | None = None
        self._task: asyncio.Task[None] | None = None

    def joined(self) -> None:
        """A life begins."""
        self._member.is_warming = self._warm_seconds > 0
        self._publisher = BlockPublisher(self._store.store, self._store.health, self._member.engine_id)
        name = f"reports of {self._member.engine_id}"
        self._task = start_task(name, self._follow(self._publisher, self._task))

    def changed(self, change: BlocksChanged) -> None:
        """Blocks came and went."""
        self._prefixes.report(self._member.engine_id, change)
        if self._publisher is not None:
            self._publisher.change(change.stored, change.evicted)

    def left(self) -> None:
        """A life has ended."""
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """End whatever goes on."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _follow(self, publisher: BlockPublisher, before: asyncio.Task[None] | None) -> None:
        """One life, when the one before has been taken back."""
        if before is not None:
            await asyncio.wait({before})
            before = None  # a cancelled task keeps its frames: each life would keep all those before it
        try:
            if self._member.is_warming:
                with logged_failures(f"warm start of {self._member.engine_id}"):
                    hot = await self._store.guarded.hot_prefixes(self._warm_prefixes)
                    await warm(self._member, hot, self._warm_seconds)
                self._member.open()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._publish(publisher), name="publisher")
                tasks.create_task(run_forever("advice", self._advise, ADVICE_SECONDS), name="advice")
        finally:
            if self._store.health.is_up:
                with logged_failures(f"farewell of {self._member.engine_id}"), suppress(StoreUnavailable):
                    await self._store.store.leave(self._member.engine_id)

    async def _publish(self, publisher: BlockPublisher) -> None:
        """Announce the engine and its blocks until cancelled."""
        await run_forever("publisher", lambda: publisher.run(lambda: self._status(publisher)), PUBLISHER_PAUSE_SECONDS)

    async def _advise(self) -> None:
        """Tell the engine what the whole pool is asked for, so that it keeps that."""
        hot = [prefix.block_hash for prefix in await self._store.guarded.hot_prefixes(MOST_ADVISED)]
        if hot:
            self._member.prefer(hot)

    def _status(self, publisher: BlockPublisher) -> EngineStatus:
        ready, stats = self._member.ready, self._member.totals.latest
        return EngineStatus(
            engine_id=self._member.engine_id,
            instance=publisher.instance,
            address=self._member.address,
            model_fingerprint=ready.model_fingerprint if ready else "",
            num_waiting=stats.num_waiting if stats else 0,
            num_running=stats.num_running if stats else 0,
            num_blocks=ready.num_blocks if ready else 0,
            blocks_free=stats.blocks_free if stats else 0,
            blocks_cached=stats.blocks_cached if stats else 0,
            blocks_held=publisher.num_held,
            prefill_tokens_per_second=stats.prefill_tokens_per_second if stats else 0.0,
            decode_tokens_per_second=stats.decode_tokens_per_second if stats else 0.0,
            draining=self._member.is_draining,
        )
