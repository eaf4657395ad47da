"""Blocks of prefixes that the whole pool is asked for are evicted last, and never stand in the way."""

from __future__ import annotations

import pytest

from cache_store.block_pool import MOST_SPARED, BlockPool

ROOT = b"r" * 16


def use(pool: BlockPool, token_ids: list[int]) -> list[bytes]:
    """Compute a prompt and let it go; the identities of its blocks."""
    match = pool.match(ROOT, token_ids, len(token_ids))
    table = pool.open(ROOT, match)
    assert pool.reserve(table, len(token_ids))
    pool.commit(table, token_ids, len(token_ids))
    hashes = list(table.hashes)
    pool.release(table)
    pool.check()
    return hashes


def prompt(number: int, num_blocks: int = 4) -> list[int]:
    return [number] * (num_blocks * 4)


def num_cached(pool: BlockPool, number: int) -> int:
    return len(pool.match(ROOT, prompt(number), 16).block_ids)


def test_what_is_preferred_outlives_what_is_used_later() -> None:
    """A hot prefix stays although many others came after it; without the preference it would be the first to go."""
    kept, lost = BlockPool(21, block_size=4), BlockPool(21, block_size=4)
    for pool in (kept, lost):
        hot = use(pool, prompt(0))
        if pool is kept:
            pool.prefer([hot[-1]])
        for number in range(1, 30):
            use(pool, prompt(number))
    assert (num_cached(kept, 0), num_cached(lost, 0)) == (4, 0)


def test_what_is_preferred_goes_when_there_is_nothing_else() -> None:
    """A sequence that needs the whole pool gets it."""
    pool = BlockPool(9, block_size=4)
    pool.prefer([use(pool, prompt(0))[-1]])
    table = pool.open(ROOT)
    assert pool.reserve(table, 8 * 4)
    pool.release(table)
    pool.check()


def test_at_most_half_of_the_pool_is_preferred() -> None:
    """However much is hot, the most popular ones fill half of the pool at most."""
    pool = BlockPool(33, block_size=4)
    hot = [use(pool, prompt(number))[-1] for number in range(8)]
    pool.prefer(hot)
    for number in range(20, 60):
        use(pool, prompt(number))
    assert [num_cached(pool, number) for number in range(8)] == [4] * 4 + [0] * 4


def test_unknown_prefixes_are_no_matter() -> None:
    """What the pool asks for and this engine does not hold changes nothing; the last word replaces the one before."""
    pool = BlockPool(21, block_size=4)
    hot = use(pool, prompt(0))
    pool.prefer([hot[-1]])
    pool.prefer([b"x" * 16])
    for number in range(1, 30):
        use(pool, prompt(number))
    assert num_cached(pool, 0) == 0


@pytest.mark.parametrize("num_blocks", [3, 4 * MOST_SPARED])
def test_an_eviction_is_bounded(num_blocks: int) -> None:
    """With a pool full of preferred blocks in a row, something is evicted after a bounded search."""
    pool = BlockPool(2 * num_blocks + 1, block_size=4)
    hot = use(pool, list(range(4 * num_blocks)))
    pool.prefer([hot[-1]])
    use(pool, list(range(10**6, 10**6 + 4 * num_blocks)))
    assert use(pool, prompt(5, num_blocks))
