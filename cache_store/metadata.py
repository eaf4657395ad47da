"""The metadata store: what a pool of engines knows of each other, and the protocol its implementations share.

It holds hints and no truth: which engine holds which prefix, how loaded each is, which prefixes the pool is asked for.
Losing all of it costs recomputed prompts, never an answer. Everything in it expires: an engine that stops announcing
itself is gone within `Retention.ttl_seconds`, and its blocks with it.

An engine's blocks are kept true by numbered batches:

    reset ──► batch 1 ──► batch 2 ──► …      each applies only behind the one before it, and applying it twice is once
      ▲                      │
      └── gap, or expired ◄──┘               `publish` says False, or `announce` a number the engine did not expect
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

FORGOTTEN_HALF_LIVES = 10
"""A prefix whose uses have decayed to less than 2 ** -10 of one is forgotten."""


class StoreUnavailable(Exception):
    """The store did not answer in time, or not as it should. What was asked may or may not have been done."""


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """How long and how much a store keeps. All engines and fronts of one namespace should agree on it."""

    ttl_seconds: float = 5.0
    """An engine not heard of for this long is gone. Several heartbeats should fit in."""
    half_life_seconds: float = 600.0
    """After this long without a use, a prefix counts half."""
    max_popular_prefixes: int = 4096
    """The least popular are forgotten above this number."""
    max_hot_prefixes: int = 0
    """How many of the most popular are kept with their token ids. 0 keeps no text of any request."""
    max_hot_tokens: int = 4096
    """A prefix of more tokens than this is counted, but its token ids are not kept."""


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an engine says of itself with every heartbeat."""

    engine_id: str
    """Unique in the namespace at any time; a restarted engine may take its old one."""
    instance: str
    """Different at every start of the engine: what another instance published is void."""
    address: str
    model_fingerprint: str
    num_waiting: int = 0
    num_running: int = 0
    num_blocks: int = 0
    """In its pool."""
    blocks_free: int = 0
    blocks_cached: int = 0
    blocks_held: int = 0
    """In which a prefix could be found, used or not."""
    prefill_tokens_per_second: float = 0.0
    decode_tokens_per_second: float = 0.0
    draining: bool = False


class BlockBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the set of blocks that an engine holds. No hash is both stored and evicted."""

    engine_id: str
    instance: str
    sequence: int
    """One more than that of the batch before it."""
    reset: bool = False
    """Whether this begins a resynchronisation: the set holds what this batch stores and nothing else."""
    stored: Sequence[bytes] = ()
    evicted: Sequence[bytes] = ()


class PrefixUse(msgspec.Struct, frozen=True, kw_only=True):
    """A request began with this prefix."""

    block_hash: bytes
    """Of its last block."""
    num_tokens: int
    token_ids: Sequence[int] = ()
    """What it says, if it may be kept (see `Retention`)."""
    cache_salt: str = ""
    """Under which it was hashed; kept beside the token ids."""


class HotPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix the pool is asked for."""

    block_hash: bytes
    num_tokens: int
    uses: float
    """Decayed number of uses."""
    token_ids: tuple[int, ...] | None = None
    """None if they are not kept."""
    cache_salt: str = ""


class MetadataStore(Protocol):
    """Every method raises `StoreUnavailable` and nothing else for a store that is slow, gone or not as it should be."""

    async def announce(self, status: EngineStatus) -> int | None:
        """A heartbeat. The sequence number of the instance's last applied batch; None if its blocks are not known."""
        ...

    async def publish(self, batch: BlockBatch) -> bool:
        """Apply a batch. False if it does not follow the last one: nothing was changed, and a reset is due."""
        ...

    async def leave(self, engine_id: str) -> None:
        """Forget an engine and its blocks at once."""
        ...

    async def engines(self) -> list[EngineStatus]:
        """The last words of every engine heard of within the retention's time to live, by id."""
        ...

    async def lookup(self, hashes: Sequence[bytes], engine_ids: Sequence[str]) -> dict[str, int]:
        """For each engine how many of the leading `hashes` (a prompt's, in order) it holds. One round trip."""
        ...

    async def record(self, uses: Sequence[PrefixUse]) -> None:
        """Count uses of prefixes.

        Count a request's longest prefix that some engine held: that is where it parts from the others. Counting every
        block instead would cost as much as a look-up for every engine and tell nothing more, as a prefix includes those
        before it.
        """
        ...

    async def hot_prefixes(self, limit: int) -> list[HotPrefix]:
        """At most `limit` prefixes, most popular first."""
        ...

    async def close(self) -> None:
        """Free what the client holds. What it stored stays until it expires."""
        ...
