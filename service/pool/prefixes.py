"""Who holds which prefix, as far as this front knows: from the engines, from the store, from what it sent itself."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice

from cache_store.guarded_store import GuardedStore
from cache_store.hashing import block_hashes, root_hash
from service.pool.member import Member
from speculation.messages import BlocksChanged, Ready, Submit

BRIDGE_SECONDS = 5.0
"""What was sent to an engine counts as held for so long, whatever is known of it: reports follow behind the work."""


class Prefixes:
    """Hints for routing. Being wrong costs computing a prompt again, never an answer.

    Of an engine that reports its blocks to this front the answer is its own report. Of others the store is asked, once
    for all of them; while it does not answer, what this front has sent to an engine has to do.
    """

    def __init__(self, store: GuardedStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._reported: dict[str, set[bytes]] = {}
        self._sent: dict[str, OrderedDict[bytes, float]] = {}
        """When each block was last part of a prompt sent there, oldest first; at most as many as the engine has."""

    @staticmethod
    def hashes(ready: Ready, submit: Submit) -> list[bytes]:
        """The blocks of a prompt that an engine could find in its cache: all but the one with the last token."""
        if submit.prompt_logprobs is not None:
            return []  # they need every row computed
        token_ids = submit.prompt_token_ids[:-1]
        return block_hashes(root_hash(ready.model_fingerprint, submit.cache_salt), token_ids, ready.block_size)

    def report(self, engine_id: str, change: BlocksChanged) -> None:
        """An engine tells this front what it holds."""
        held = self._reported.setdefault(engine_id, set())
        held.difference_update(change.evicted)
        held.update(change.stored)

    def num_held(self, member: Member) -> int:
        """How many blocks an engine says it holds, here or to the store."""
        return member.num_held_by_store if member.observer is None else len(self._reported.get(member.engine_id, ()))

    def sent(self, member: Member, hashes: Sequence[bytes]) -> None:
        """A prompt goes to an engine, which will hold it soon."""
        now = self._clock()
        sent = self._sent.setdefault(member.engine_id, OrderedDict())
        for block_hash in hashes:
            sent[block_hash] = now
            sent.move_to_end(block_hash)
        most = member.ready.num_blocks if member.ready is not None else 0
        while len(sent) > most:
            sent.popitem(last=False)

    def forget(self, engine_id: str) -> None:
        """An engine has lost what it held."""
        self._reported.pop(engine_id, None)
        self._sent.pop(engine_id, None)

    async def held(self, hashes: Sequence[bytes], members: Sequence[Member]) -> dict[str, int]:
        """For each engine how many of the leading `hashes` it probably holds. One round trip at most."""
        others = [member.engine_id for member in members if member.observer is None]
        known: dict[str, int] | None = {}
        if hashes and others and len(members) > 1:
            known = await self._store.lookup(hashes, others)
        return self._count(hashes, members, known)

    def guess(self, hashes: Sequence[bytes], members: Sequence[Member]) -> dict[str, int]:
        """The same, at once, without asking anybody."""
        return self._count(hashes, members, None)

    def _count(
        self, hashes: Sequence[bytes], members: Sequence[Member], known: dict[str, int] | None
    ) -> dict[str, int]:
        bridged = self._clock() - BRIDGE_SECONDS
        counts = {}
        for member in members:
            engine_id = member.engine_id
            reported = self._reported.get(engine_id, frozenset[bytes]())
            sent = self._sent.get(engine_id, OrderedDict[bytes, float]())
            is_blind = known is None and member.observer is None
            count = 0 if known is None else known.get(engine_id, 0)
            for block_hash in islice(hashes, count, None):
                if block_hash not in reported and not (block_hash in sent and (is_blind or sent[block_hash] > bridged)):
                    break
                count += 1
            counts[engine_id] = count
        return counts
