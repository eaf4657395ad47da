"""Keeps the metadata store's picture of one engine true, from beside the step loop."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable
from itertools import islice

from cache_store.metadata import BlockBatch, EngineStatus, MetadataStore, StoreUnavailable
from cache_store.store_health import StoreHealth


class BlockPublisher:
    """Takes the changes of an engine's block pool and publishes them in numbered batches.

    It remembers which hashes the engine holds, so that it can tell a store that lost them everything again without
    asking the engine. Of what is not published yet it keeps the net effect alone: after an outage of any length that is
    at most what the engine holds now, and what it held then.
    """

    def __init__(self, store: MetadataStore, health: StoreHealth, engine_id: str, *, max_batch: int = 4096) -> None:
        self.engine_id = engine_id
        self.instance = secrets.token_hex(8)
        self._store = store
        self._health = health
        self._max_batch = max_batch
        self._held: dict[bytes, None] = {}
        self._pending: dict[bytes, bool] = {}
        """Where what the engine holds differs from what was published: True is to be stored, False to be evicted."""
        self._must_reset = True
        self._sequence = 0
        """Of the last batch that was made."""
        self._in_doubt: BlockBatch | None = None
        """A batch that was sent and whose answer did not come: it may or may not have been applied."""

    @property
    def num_held(self) -> int:
        """How many blocks the engine holds."""
        return len(self._held)

    def change(self, stored: Iterable[bytes], evicted: Iterable[bytes]) -> None:
        """The engine stored blocks, and after that evicted some. Takes note, and does not wait."""
        for block_hash in stored:
            if block_hash not in self._held:
                self._held[block_hash] = None
                self._note(block_hash, True)
        for block_hash in evicted:
            if block_hash in self._held:
                del self._held[block_hash]
                self._note(block_hash, False)

    async def run(
        self,
        status: Callable[[], EngineStatus],
        *,
        heartbeat_seconds: float = 1.0,
        publish_seconds: float = 0.1,
    ) -> None:
        """Announce and publish until cancelled. `status` is asked before each heartbeat."""
        clock = asyncio.get_running_loop().time
        next_heartbeat = clock()
        while True:
            if self._health.may_try:
                try:
                    # Whether the store still knows us is the first thing to ask when it may be back.
                    if clock() >= next_heartbeat or not self._health.is_up:
                        next_heartbeat = clock() + heartbeat_seconds
                        await self.announce(status())
                    await self.publish()
                except StoreUnavailable as error:
                    self._health.failed(error)
                else:
                    self._health.succeeded()
            await asyncio.sleep(publish_seconds)

    async def announce(self, status: EngineStatus) -> None:
        """Send one heartbeat, and see by its answer whether the store lost what was published.

        Raises StoreUnavailable.
        """
        known = await self._store.announce(status)
        if known != self._sequence and (self._in_doubt is None or known != self._sequence - 1):
            self._start_over()

    async def publish(self) -> None:
        """Publish everything that changed. Raises StoreUnavailable, and goes on from there when called again."""
        while (batch := self._in_doubt or self._next_batch()) is not None:
            self._in_doubt = batch
            applied = await self._store.publish(batch)
            self._in_doubt = None
            if not applied:
                self._start_over()

    def _note(self, block_hash: bytes, stored: bool) -> None:
        """Note a change, or forget the one before it, which it undoes."""
        if self._pending.pop(block_hash, stored) == stored:
            self._pending[block_hash] = stored

    def _start_over(self) -> None:
        self._must_reset = True
        self._in_doubt = None
        self._pending = dict.fromkeys(self._held, True)

    def _next_batch(self) -> BlockBatch | None:
        if not self._pending and not self._must_reset:
            return None
        changes = dict(islice(self._pending.items(), self._max_batch))
        for block_hash in changes:
            del self._pending[block_hash]
        reset, self._must_reset = self._must_reset, False
        self._sequence += 1
        return BlockBatch(
            engine_id=self.engine_id,
            instance=self.instance,
            sequence=self._sequence,
            reset=reset,
            stored=[block_hash for block_hash, stored in changes.items() if stored],
            evicted=[block_hash for block_hash, stored in changes.items() if not stored],
        )
