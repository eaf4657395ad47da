"""The Triton attention kernels, in Triton's interpreter, against the torch backend and against themselves."""

from __future__ import annotations

import pytest
import torch

from target.attention import HeadLayout
from target.triton.attention import TritonAttention
from tests.target.triton.conftest import BLOCK_SIZE, BUSHY, Case, Entry

HEADS = HeadLayout(4, 2, 32)
SPLIT = 64
MIXED = (Entry(0, 19), Entry(130), Entry(63, 1, BUSHY), Entry(126, 3, range(-1, 4)), Entry(15, 2, BUSHY))
"""A prompt, a single token, a tree that begins at a split's edge, a chain of guesses across one, a short tree."""


def backend(case: Case, *, window: int | None = None, pieces: bool = True) -> TritonAttention:
    """With room to reduce splits apart, or with none."""
    return TritonAttention(case.pool, case.heads, window=window, split=SPLIT, pieces_bytes=1 << 20 if pieces else 1)


@pytest.mark.parametrize("window", [None, 20, 70])
@pytest.mark.parametrize("pieces", [True, False])
def test_ragged_batches_with_trees_agree_with_torch(window: int | None, pieces: bool) -> None:
    """Prompts, single tokens, chains and trees in one launch give what torch gives; padding rows give zeros."""
    case = Case(MIXED, HEADS)
    out = case.attend(backend(case, window=window, pieces=pieces), padding=3)
    assert torch.allclose(out[:-3], case.expected(window), atol=2e-6)
    assert not out[-3:].any()


@pytest.mark.parametrize(
    ("heads", "dtype", "tolerance"),
    [
        (HeadLayout(3, 1, 64), torch.bfloat16, 2e-2),
        (HeadLayout(2, 2, 96), torch.float16, 2e-3),
        (HeadLayout(8, 1, 128), torch.bfloat16, 2e-2),
        (HeadLayout(2, 1, 256), torch.float32, 5e-6),
        (HeadLayout(6, 2, 16), torch.float32, 2e-6),
    ],
    ids=str,
)
def test_heads_and_precisions_agree_with_torch(heads: HeadLayout, dtype: torch.dtype, tolerance: float) -> None:
    """Head sizes, groups of query heads and precisions of all kinds give what torch gives."""
    case = Case((Entry(70), Entry(20, 1, BUSHY)), heads, dtype=dtype)
    out = case.attend(backend(case))
    assert torch.allclose(out.float(), case.expected().float(), atol=tolerance)


@pytest.mark.parametrize("total", [15, 16, 17, 63, 64, 65, 128, 129])
def test_block_and_split_boundaries_agree_with_torch(total: int) -> None:
    """Sequences that end at, before and behind the edges of blocks and splits give what torch gives."""
    case = Case((Entry(total - 1), Entry(total - 2, 2)), HeadLayout(2, 1, 32))
    assert torch.allclose(case.attend(backend(case)), case.expected(), atol=2e-6)


def test_new_keys_and_values_are_written_where_they_belong() -> None:
    """After a forward the pool holds the new keys and values, bit for bit, and nothing else of it has changed."""
    case = Case(MIXED, HEADS)
    before = case.pool.entries.clone()
    case.attend(backend(case), padding=2)
    slots = torch.from_numpy(case.batch.slot_mapping)
    assert torch.equal(case.written[1][:, slots], case.qkv[:, HEADS.num_heads :].transpose(0, 1))
    case.written[1][:, slots] = before[1][:, slots]
    untouched = slice(BLOCK_SIZE, None)  # padding is written into the null block
    assert torch.equal(case.written[:, :, untouched].nan_to_num(), before[:, :, untouched].nan_to_num())


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("pieces", [True, False])
def test_a_row_does_not_depend_on_its_neighbours(window: int | None, pieces: bool) -> None:
    """Each sequence alone, reduced in pieces, gives bit for bit what it gives among others, in pieces or whole."""
    among = Case(MIXED, HEADS)
    together = among.attend(backend(among, window=window, pieces=pieces))
    for i, entry in enumerate(MIXED):
        alone = Case((entry,), HEADS)
        alone.qkv = among.qkv[among.rows(i)]
        copy_context(among, i, alone, 0, entry.computed)
        assert torch.equal(alone.attend(backend(alone, window=window)), together[among.rows(i)])


@pytest.mark.parametrize("window", [None, 50])
def test_chunks_and_single_tokens_equal_a_whole_prompt(window: int | None) -> None:
    """A prompt of 135 tokens at once, its last 5 in a chunk, and each of them alone, give equal rows."""
    whole = Case((Entry(0, 135),), HEADS)
    rows = whole.attend(backend(whole, window=window))
    for computed, chain in ((130, 5), *((i, 1) for i in range(130, 135))):
        part = Case((Entry(computed, chain),), HEADS)
        part.qkv = whole.qkv[computed : computed + chain]
        whole.pool.entries, kept = whole.written, whole.pool.entries
        copy_context(whole, 0, part, 0, computed)
        whole.pool.entries = kept
        assert torch.equal(part.attend(backend(part, window=window)), rows[computed : computed + chain])


@pytest.mark.parametrize("computed", [20, 60, 64, 125])
def test_tree_rows_equal_their_paths_as_chains(computed: int) -> None:
    """Each node of a bushy tree has the result its path would have as committed tokens, also across splits."""
    tree = Case((Entry(computed, 1, BUSHY),), HEADS)
    rows = tree.attend(backend(tree))
    for node in (3, 5, len(BUSHY) - 1):
        path = path_to(node)
        chain = Case((Entry(computed, 1 + len(path)),), HEADS)
        chain.qkv = tree.qkv[[0, *(1 + i for i in path)]]
        copy_context(tree, 0, chain, 0, computed)
        assert torch.equal(chain.attend(backend(chain))[-1], rows[1 + node])


def path_to(node: int) -> list[int]:
    return [*path_to(BUSHY[node]), node] if node >= 0 else []


def copy_context(source: Case, one: int, target: Case, other: int, count: int) -> None:
    """The first `count` entries of a sequence of one case for a sequence of another."""
    tables = source.tables[one], target.tables[other]
    slots = [[table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(count)] for table in tables]
    target.pool.entries[:, :, slots[1]] = source.pool.entries[:, :, slots[0]]
