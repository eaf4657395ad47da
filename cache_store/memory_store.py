"""The metadata store of a single process: the default, and the specification the others are tested against."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cache_store.metadata import FORGOTTEN_HALF_LIVES, BlockBatch, EngineStatus, HotPrefix, PrefixUse, Retention


@dataclass(slots=True)
class _Blocks:
    """What one engine holds, as far as it said so."""

    instance: str
    sequence: int
    hashes: set[bytes]
    expires: float


@dataclass(slots=True)
class _Popularity:
    """Uses of one prefix, on the scale of forward decay."""

    num_tokens: int
    score: float
    """log2 of the sum over uses of 2 ** (time of use / half-life) [Cormode et al., ICDE 2009].

    It never needs to be aged, and the order of two scores is that of the decayed counts at any time."""
    token_ids: tuple[int, ...] | None = None
    cache_salt: str = ""


@dataclass(slots=True)
class MemoryStore:
    """Satisfies `MetadataStore`; always available."""

    retention: Retention = field(default_factory=Retention)
    clock: Callable[[], float] = time.monotonic
    _statuses: dict[str, tuple[float, EngineStatus]] = field(default_factory=dict, init=False)
    """When it expires, and what it is."""
    _blocks: dict[str, _Blocks] = field(default_factory=dict, init=False)
    _popular: dict[bytes, _Popularity] = field(default_factory=dict, init=False)

    async def announce(self, status: EngineStatus) -> int | None:
        """See `MetadataStore`."""
        now = self.clock()
        self._expire(now)
        self._statuses[status.engine_id] = (now + self.retention.ttl_seconds, status)
        blocks = self._blocks.get(status.engine_id)
        if blocks is None or blocks.instance != status.instance:
            return None
        blocks.expires = now + self.retention.ttl_seconds
        return blocks.sequence

    async def publish(self, batch: BlockBatch) -> bool:
        """See `MetadataStore`."""
        now = self.clock()
        self._expire(now)
        blocks = self._blocks.get(batch.engine_id)
        known = (blocks.instance, blocks.sequence) if blocks else None
        if known == (batch.instance, batch.sequence):
            return True
        if batch.reset:
            blocks = _Blocks(batch.instance, batch.sequence, set(), 0.0)
            self._blocks[batch.engine_id] = blocks
        elif blocks is None or known != (batch.instance, batch.sequence - 1):
            return False
        blocks.sequence = batch.sequence
        blocks.expires = now + self.retention.ttl_seconds
        blocks.hashes.difference_update(batch.evicted)
        blocks.hashes.update(batch.stored)
        return True

    async def leave(self, engine_id: str) -> None:
        """See `MetadataStore`."""
        self._statuses.pop(engine_id, None)
        self._blocks.pop(engine_id, None)

    async def engines(self) -> list[EngineStatus]:
        """See `MetadataStore`."""
        self._expire(self.clock())
        return [status for _, (_, status) in sorted(self._statuses.items())]

    async def lookup(self, hashes: Sequence[bytes], engine_ids: Sequence[str]) -> dict[str, int]:
        """See `MetadataStore`."""
        self._expire(self.clock())
        return {engine_id: self._count_held(engine_id, hashes) for engine_id in engine_ids}

    async def record(self, uses: Sequence[PrefixUse]) -> None:
        """See `MetadataStore`."""
        now = self.clock() / self.retention.half_life_seconds
        for use in uses:
            known = self._popular.setdefault(use.block_hash, _Popularity(use.num_tokens, -math.inf))
            known.score = _log2_sum(known.score, now)
            if 0 < len(use.token_ids) <= self.retention.max_hot_tokens:
                known.token_ids, known.cache_salt = tuple(use.token_ids), use.cache_salt
        self._popular = dict(self._ranked(now)[: self.retention.max_popular_prefixes])
        with_text = [popularity for popularity in self._popular.values() if popularity.token_ids is not None]
        for popularity in with_text[self.retention.max_hot_prefixes :]:
            popularity.token_ids, popularity.cache_salt = None, ""

    async def hot_prefixes(self, limit: int) -> list[HotPrefix]:
        """See `MetadataStore`."""
        now = self.clock() / self.retention.half_life_seconds
        return [
            HotPrefix(
                block_hash=block_hash,
                num_tokens=popularity.num_tokens,
                uses=2.0 ** (popularity.score - now),
                token_ids=popularity.token_ids,
                cache_salt=popularity.cache_salt,
            )
            for block_hash, popularity in self._ranked(now)[:limit]
        ]

    async def close(self) -> None:
        """See `MetadataStore`."""

    def _count_held(self, engine_id: str, hashes: Sequence[bytes]) -> int:
        if engine_id not in self._blocks:
            return 0
        held = self._blocks[engine_id].hashes
        return next((i for i, block_hash in enumerate(hashes) if block_hash not in held), len(hashes))

    def _ranked(self, now: float) -> list[tuple[bytes, _Popularity]]:
        """Most popular first, without the forgotten. `now` is in half-lives."""
        remembered = [item for item in self._popular.items() if item[1].score > now - FORGOTTEN_HALF_LIVES]
        return sorted(remembered, key=lambda item: item[1].score, reverse=True)

    def _expire(self, now: float) -> None:
        for engine_id in [each for each, (expires, _) in self._statuses.items() if expires <= now]:
            del self._statuses[engine_id]
        for engine_id in [each for each, blocks in self._blocks.items() if blocks.expires <= now]:
            del self._blocks[engine_id]


def _log2_sum(left: float, right: float) -> float:
    """log2(2 ** left + 2 ** right), without leaving the range of floats."""
    low, high = sorted((left, right))
    return high + math.log2(1.0 + 2.0 ** (low - high))
