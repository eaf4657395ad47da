"""Block identity: what makes two hashes equal, and that nothing else does."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.hashing import HASH_SIZE, block_hash, block_hashes, root_hash

TOKEN_IDS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
TEXT = st.text(st.characters(codec=None), max_size=20)


def test_hashes_are_the_documented_ones() -> None:
    """The values are fixed for ever: another machine, Python or release must find the same blocks."""
    root = root_hash("model", "salt")
    assert root.hex() == "82a4b083ccb387e26c478d876c5bded8"
    assert [h.hex() for h in block_hashes(root, [1, 2, 3, 4], 2)] == [
        "5bcc9a0a75c9a5482ccb0b4eec30e59c",
        "12d9548b80170947347acc5366b08cc6",
    ]
    assert len(root) == HASH_SIZE


def test_hashes_do_not_depend_on_the_process() -> None:
    """A process with another string hash seed computes the same hash."""
    code = "from cache_store.hashing import *; print(block_hashes(root_hash('m', 's'), range(16), 16)[0].hex())"
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout.strip()
        for seed in ("0", "1234")
    }
    assert seen == {block_hashes(root_hash("m", "s"), range(16), 16)[0].hex()}


@given(TEXT, TEXT, TEXT, TEXT)
def test_roots_are_equal_only_for_equal_models_and_salts(
    model: str, salt: str, other_model: str, other_salt: str
) -> None:
    """Any change of fingerprint or salt, a moved boundary between them included, gives another root."""
    assert (root_hash(model, salt) == root_hash(other_model, other_salt)) == (
        (model, salt) == (other_model, other_salt)
    )
    assert root_hash("ab", "c") != root_hash("a", "bc")


@given(TOKEN_IDS, TOKEN_IDS)
def test_blocks_of_two_salts_never_share_a_hash(token_ids: list[int], others: list[int]) -> None:
    """The same tokens under another salt or model have nothing in common, at any position."""
    roots = [root_hash("m", "a"), root_hash("m", "b"), root_hash("n", "a")]
    hashes = [set(block_hashes(root, token_ids + others, 4)) for root in roots]
    assert len(set().union(*hashes)) == sum(len(each) for each in hashes)


@given(TOKEN_IDS, TOKEN_IDS, st.integers(1, 8))
def test_hashes_agree_exactly_as_far_as_the_tokens_do(left: list[int], right: list[int], block_size: int) -> None:
    """Block i has the same hash in two prompts if and only if their first (i + 1) blocks of tokens are the same."""
    root = root_hash("m", "")
    pairs = zip(block_hashes(root, left, block_size), block_hashes(root, right, block_size), strict=False)
    for i, (a, b) in enumerate(pairs, start=1):
        assert (a == b) == (left[: i * block_size] == right[: i * block_size])


@given(TOKEN_IDS, st.integers(1, 8))
def test_one_block_at_a_time_is_all_at_once(token_ids: list[int], block_size: int) -> None:
    """Growing a sequence block by block gives the hashes of the whole, and its tail has none."""
    root = parent = root_hash("m", "")
    chained = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_hash(parent, token_ids[start : start + block_size])
        chained.append(parent)
    assert block_hashes(root, token_ids, block_size) == chained


def test_any_integer_sequence_will_do() -> None:
    """Lists, ranges and arrays of the same ids are the same block."""
    root = root_hash("m", "")
    assert block_hash(root, array("I", range(16))) == block_hash(root, range(16)) == block_hash(root, list(range(16)))


@pytest.mark.parametrize("token_id", [-1, 2**32, 1.5])
def test_a_token_id_out_of_range_is_refused(token_id: int) -> None:
    """No two ids can be packed alike, so one that does not fit is an error and not truncated."""
    with pytest.raises(ValueError, match="token_ids must be integers from 0 to 4294967295"):
        block_hash(root_hash("m", ""), [token_id])


def test_a_parent_that_is_no_hash_is_refused() -> None:
    """A parent of another length would shift the boundary between the two fields."""
    with pytest.raises(ValueError, match="parent is 3 bytes long"):
        block_hash(b"abc", [1])


def test_a_block_size_below_one_is_refused() -> None:
    """The error names the argument."""
    with pytest.raises(ValueError, match="block_size is 0"):
        block_hashes(root_hash("m", ""), [1], 0)
