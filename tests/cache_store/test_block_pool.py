"""The block pool: sharing, eviction in order of use, and errors that would corrupt a cache."""

from __future__ import annotations

import pytest

from cache_store.block_pool import BlockPool, BlockTable
from cache_store.hashing import root_hash

ROOT = root_hash("model", "")


def filled(pool: BlockPool, token_ids: list[int], root: bytes = ROOT) -> BlockTable:
    """A table whose tokens are computed and committed, sharing what is cached."""
    table = pool.open(root, pool.match(root, token_ids, len(token_ids)))
    assert pool.reserve(table, len(token_ids))
    pool.commit(table, token_ids, len(token_ids))
    return table


def test_equal_prefixes_share_blocks() -> None:
    """Two tables with a common prefix hold the same blocks for it, and each its own behind it."""
    pool = BlockPool(20, 4)
    first = filled(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    second = filled(pool, [1, 2, 3, 4, 5, 6, 7, 0, 9])
    assert second.block_ids[0] == first.block_ids[0]
    assert not set(second.block_ids[1:]) & set(first.block_ids[1:])
    assert pool.num_in_use == 5
    pool.check()


def test_least_recently_used_prefix_is_evicted_first() -> None:
    """Of released prefixes the one unused for longest goes when room is needed; a hit makes a prefix young again."""
    pool = BlockPool(4, 2)
    for tokens in ([1, 1], [2, 2], [3, 3]):
        pool.release(filled(pool, tokens))
    pool.release(filled(pool, [1, 1]))
    pool.release(filled(pool, [4, 4]))
    found = [pool.match(ROOT, [t, t], 2).num_tokens for t in (1, 2, 3, 4)]
    assert found == [2, 0, 2, 2]


def test_the_tail_of_a_released_sequence_is_evicted_before_its_head() -> None:
    """A prefix outlives what followed it."""
    pool = BlockPool(5, 2)
    pool.release(filled(pool, [1, 2, 3, 4, 5, 6]))
    hog = pool.open(b"")
    assert pool.reserve(hog, 4)
    assert pool.match(ROOT, [1, 2, 3, 4, 5, 6], 6).num_tokens == 4


def test_free_blocks_are_taken_before_cached_ones() -> None:
    """Nothing is forgotten while there is empty room."""
    pool = BlockPool(6, 2)
    pool.release(filled(pool, [1, 1, 2, 2]))
    hog = pool.open(b"")
    assert pool.reserve(hog, 6)
    assert pool.match(ROOT, [1, 1, 2, 2], 4).num_tokens == 4


def test_reserve_is_all_or_nothing() -> None:
    """A reservation that does not fit changes nothing."""
    pool = BlockPool(4, 2)
    table = pool.open(ROOT)
    assert pool.reserve(table, 2)
    assert not pool.reserve(table, 100)
    assert len(table.block_ids) == 1
    assert pool.num_free == 2
    pool.check()


def test_a_colliding_hash_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """If two different blocks had the same identity, stored token ids would tell them apart."""
    monkeypatch.setattr("cache_store.block_pool.block_hash", lambda parent, token_ids: b"same")
    pool = BlockPool(8, 2)
    filled(pool, [1, 2])
    assert pool.match(ROOT, [1, 2], 2).num_tokens == 2
    assert pool.match(ROOT, [3, 4], 2).num_tokens == 0
    assert pool.match(root_hash("model", "tenant"), [1, 2], 2).num_tokens == 0


def test_trim_gives_back_room_and_never_committed_tokens() -> None:
    """Trimming returns the blocks beyond what is needed, and refuses to drop a hashed one."""
    pool = BlockPool(10, 2)
    table = filled(pool, [1, 2, 3, 4])
    assert pool.reserve(table, 12)
    pool.trim(table, 5)
    assert len(table.block_ids) == 3
    with pytest.raises(ValueError, match="committed"):
        pool.trim(table, 1)


def test_changes_tell_what_entered_and_left_the_index() -> None:
    """Each identity is reported once when it is stored and once when it is evicted."""
    pool = BlockPool(3, 2)
    pool.release(filled(pool, [1, 1]))
    stored, evicted = pool.drain_changes()
    assert (len(stored), evicted) == (1, [])
    hog = pool.open(b"")
    assert pool.reserve(hog, 4)
    assert pool.drain_changes() == ([], stored)
    assert pool.drain_changes() == ([], [])


def test_check_names_a_lost_block() -> None:
    """The integrity check finds a block that is nowhere."""
    pool = BlockPool(4, 2)
    pool._free.pop()
    with pytest.raises(AssertionError, match="not all blocks"):
        pool.check()


def test_a_pool_needs_a_block_to_use() -> None:
    """A pool of the null block alone is refused with the reason."""
    with pytest.raises(ValueError, match="num_blocks is 1; at least 2"):
        BlockPool(1)
