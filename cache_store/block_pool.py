"""The block pool: which block of the KV cache belongs to whom, and what a released block still remembers.

Every block is in exactly one of three states, and `check` proves it:

    free ── reserve ──► in use ── release / trim ──► cached   (its content is known by hash: a prefix hit revives it)
      ▲                   │                            │
      └───────────────────┴── (content not hashed) ◄───┴── evicted, least recently used first, when nothing is free

Block 0 is the null block: padding is written there, and it is in none of the states.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from cache_store.hashing import block_hash

MOST_SPARED = 64
"""At most so many preferred blocks in a row are passed over for an eviction: it takes a bounded time."""


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one sequence, in logical order. Made, changed and emptied by the pool alone."""

    block_ids: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    """Identities of the leading full blocks whose tokens are committed and computed."""
    root: bytes = b""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest cached prefix of some tokens. Valid until the pool changes."""

    block_ids: tuple[int, ...]
    hashes: tuple[bytes, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Content:
    """What a hashed block holds, kept to be compared: a hash collision must not serve wrong keys and values."""

    hash: bytes
    parent: bytes
    token_ids: tuple[int, ...]


class BlockPool:
    """Allocates the blocks of a KV cache, with prefix caching by content and LRU eviction.

    Nothing else in the program changes a block or a block table.
    """

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}; at least 2 are needed: the null block and one to use")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Blocks nobody uses whose content is known, least recently used first."""
        self._ref_counts = [0] * num_blocks
        self._contents: dict[int, _Content] = {}
        self._index: dict[bytes, int] = {}
        self._tables: set[BlockTable] = set()
        self._preferred: set[bytes] = set()
        self._stored: list[bytes] = []
        self._evicted: list[bytes] = []

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody uses and a prefix hit may revive."""
        return len(self._cached)

    @property
    def num_in_use(self) -> int:
        """Blocks in at least one block table."""
        return self.num_usable - self.num_free - self.num_cached

    @property
    def num_available(self) -> int:
        """Blocks that `reserve` can hand out: free ones, and cached ones by eviction."""
        return self.num_free + self.num_cached

    @property
    def num_usable(self) -> int:
        """All blocks but the null block."""
        return self.num_blocks - 1

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens`."""
        return -(-num_tokens // self.block_size)

    def match(self, root: bytes, token_ids: Sequence[int], max_tokens: int) -> PrefixMatch:
        """The longest cached prefix of `token_ids` in whole blocks, of at most `max_tokens`. Changes nothing."""
        block_ids: list[int] = []
        hashes: list[bytes] = []
        parent = root
        for start in range(0, max_tokens - self.block_size + 1, self.block_size):
            tokens = tuple(token_ids[start : start + self.block_size])
            identity = block_hash(parent, tokens)
            block_id = self._index.get(identity)
            if block_id is None:
                break
            content = self._contents[block_id]
            if content.token_ids != tokens or content.parent != parent:
                break
            block_ids.append(block_id)
            hashes.append(identity)
            parent = identity
        return PrefixMatch(tuple(block_ids), tuple(hashes), len(block_ids) * self.block_size)

    def num_revived(self, match: PrefixMatch) -> int:
        """How many of the match's blocks are cached, so that opening it takes them from what is available."""
        return sum(1 for block_id in match.block_ids if block_id in self._cached)

    def open(self, root: bytes, match: PrefixMatch | None = None) -> BlockTable:
        """A new block table that begins with the blocks of `match`, shared with whoever has them."""
        table = BlockTable(root=root)
        if match is not None:
            for block_id in match.block_ids:
                self._take(block_id)
            table.block_ids.extend(match.block_ids)
            table.hashes.extend(match.hashes)
        self._tables.add(table)
        return table

    def reserve(self, table: BlockTable, num_tokens: int) -> bool:
        """Make room in `table` for `num_tokens` in all. False, with nothing changed, if there are not enough blocks."""
        missing = self.blocks_for(num_tokens) - len(table.block_ids)
        if missing > self.num_available:
            return False
        for _ in range(missing):
            table.block_ids.append(self._allocate())
        return True

    def capacity(self, table: BlockTable) -> int:
        """How many tokens the blocks of `table` hold."""
        return len(table.block_ids) * self.block_size

    def commit(self, table: BlockTable, token_ids: Sequence[int], num_computed: int) -> None:
        """The first `num_computed` of `token_ids` are committed and in the cache: index the blocks they fill.

        Draft tokens must never be among them. Where another block has the same content already, that one stays the
        indexed one and this one stays private.
        """
        for index in range(len(table.hashes), num_computed // self.block_size):
            start = index * self.block_size
            tokens = tuple(token_ids[start : start + self.block_size])
            parent = table.hashes[-1] if table.hashes else table.root
            identity = block_hash(parent, tokens)
            table.hashes.append(identity)
            if identity not in self._index:
                block_id = table.block_ids[index]
                self._index[identity] = block_id
                self._contents[block_id] = _Content(identity, parent, tokens)
                self._stored.append(identity)

    def trim(self, table: BlockTable, num_tokens: int) -> None:
        """Give back the blocks of `table` beyond those that `num_tokens` need: room that rejected guesses took."""
        keep = self.blocks_for(num_tokens)
        if keep < len(table.hashes):
            raise ValueError(f"trim to {num_tokens} tokens would drop a block of committed tokens")
        while len(table.block_ids) > keep:
            self._drop(table.block_ids.pop())

    def release(self, table: BlockTable) -> None:
        """Give every block of `table` back, the last to be evicted first, so that prefixes outlive tails."""
        self._tables.remove(table)
        while table.block_ids:
            self._drop(table.block_ids.pop())
        table.hashes.clear()

    def prefer(self, identities: Sequence[bytes]) -> None:
        """From now on these blocks and those before them are evicted last, as far as they are here.

        In order: the first ones count most, and no more than half of the pool is preferred, so that there is always
        something else to evict. Replaces what was preferred before.
        """
        preferred: set[bytes] = set()
        most = self.num_usable // 2
        for identity in identities:
            chain = [each for each in self._chain(identity) if each not in preferred]
            if len(preferred) + len(chain) <= most:
                preferred.update(chain)
        self._preferred = preferred

    def drain_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Identities that entered and left the index since the last call, for the metadata store: the net effect."""
        stored = [identity for identity in dict.fromkeys(self._stored) if identity in self._index]
        evicted = [identity for identity in dict.fromkeys(self._evicted) if identity not in self._index]
        self._stored, self._evicted = [], []
        return stored, evicted

    def indexed_hashes(self) -> list[bytes]:
        """The identities of all blocks a prefix hit could find."""
        return list(self._index)

    def check(self) -> None:
        """Prove that no block is lost, shared by mistake or in two states. Raises `AssertionError` saying which."""
        counts = [0] * self.num_blocks
        for table in self._tables:
            for block_id in table.block_ids:
                counts[block_id] += 1
        for block_id in range(1, self.num_blocks):
            if counts[block_id] != self._ref_counts[block_id]:
                raise AssertionError(
                    f"block {block_id} is in {counts[block_id]} tables, its ref count says {self._ref_counts[block_id]}"
                )
        idle = [*self._free, *self._cached]
        in_use = [block_id for block_id in range(1, self.num_blocks) if counts[block_id]]
        if sorted(idle + in_use) != list(range(1, self.num_blocks)):
            raise AssertionError("free, cached and used blocks are not all blocks, each once")
        if counts[0]:
            raise AssertionError("the null block is in a table")
        for block_id in self._cached:
            if block_id not in self._contents:
                raise AssertionError(f"block {block_id} is cached without content")
        for identity, block_id in self._index.items():
            if self._contents[block_id].hash != identity:
                raise AssertionError(f"the index and the content of block {block_id} disagree")
        if len(self._index) != len(self._contents):
            raise AssertionError("there are contents that the index does not know")

    def _allocate(self) -> int:
        block_id = self._free.pop() if self._free else self._evict()
        self._ref_counts[block_id] = 1
        return block_id

    def _chain(self, identity: bytes) -> Iterator[bytes]:
        """A block and those before it, as far as they are here."""
        while (block_id := self._index.get(identity)) is not None:
            yield identity
            identity = self._contents[block_id].parent

    def _evict(self) -> int:
        """The least recently used cached block, or one behind it that is not preferred."""
        for _ in range(MOST_SPARED):
            block_id = next(iter(self._cached))
            if self._contents[block_id].hash not in self._preferred:
                break
            self._cached.move_to_end(block_id)
        block_id, _ = self._cached.popitem(last=False)
        self._forget(block_id)
        return block_id

    def _take(self, block_id: int) -> None:
        if self._ref_counts[block_id] == 0:
            del self._cached[block_id]
        self._ref_counts[block_id] += 1

    def _drop(self, block_id: int) -> None:
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id]:
            return
        if block_id in self._contents:
            self._cached[block_id] = None
        else:
            self._free.append(block_id)

    def _forget(self, block_id: int) -> None:
        content = self._contents.pop(block_id)
        del self._index[content.hash]
        self._evicted.append(content.hash)
