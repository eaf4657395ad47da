"""Which prefixes requests share, told to the store about once a second."""

from __future__ import annotations

from collections.abc import Sequence

from cache_store.metadata import PrefixUse
from service.background import run_forever
from service.pool.store import PoolStore
from speculation.messages import Submit

RECORD_SECONDS = 1.0
MAX_USES = 4096
"""Kept between two records; a front that is asked more often counts a sample."""


class Popularity:
    """Counts for each request the longest prefix that some engine held: where it parts from the others."""

    def __init__(self, store: PoolStore) -> None:
        self._store = store
        self._uses: list[PrefixUse] = []

    def note(self, submit: Submit, hashes: Sequence[bytes], num_held: int, block_size: int) -> None:
        """A request has come of whose leading blocks some engine holds `num_held`."""
        if not num_held or len(self._uses) >= MAX_USES:
            return
        num_tokens = num_held * block_size
        keep = self._store.keeps_text and num_tokens <= self._store.retention.max_hot_tokens
        self._uses.append(
            PrefixUse(
                block_hash=hashes[num_held - 1],
                num_tokens=num_tokens,
                token_ids=tuple(submit.prompt_token_ids[:num_tokens]) if keep else (),
                cache_salt=submit.cache_salt if keep else "",
            )
        )

    async def run(self) -> None:
        """Record until cancelled."""
        await run_forever("popular prefixes", self.flush, RECORD_SECONDS)

    async def flush(self) -> None:
        """Record now. What the store does not take is not kept."""
        uses, self._uses = self._uses, []
        if uses:
            await self._store.guarded.record(uses)
