"""A row's logits depend on what it sees alone, bit for bit: not on neighbours, chunks, threads or instructions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from target.layout import BatchEntry
from target.native.isa import ISAS, supported_isas
from target.native.runner import NativeRunner
from tests.target.forwards import blocks, in_chunks, run, tokens
from tests.target.native.conftest import NUM_BLOCKS, MakeRunner, ModelOf

BUSHY = (-1, 0, 0, 1, -1, 4, 3, 2, 6, 8, 9, 5, 10)
"""Parents of a tree whose nodes do not stand in the order of any path."""
QUANTIZATIONS = ["q4", "int8", "none"]


@pytest.fixture(params=QUANTIZATIONS)
def runner(request: pytest.FixtureRequest, model_of: ModelOf, make_runner: MakeRunner) -> NativeRunner:
    """A tiny model whose cache holds nothing but NaN, so that whatever is read and not its own shows."""
    runner = make_runner(model_of("smollm"), quantization=request.param)
    runner.kv_pool.keys[...] = np.nan
    runner.kv_pool.values[...] = np.nan
    return runner


def path_to(node: int) -> list[int]:
    """The nodes from the root to `node`, it included."""
    return [*path_to(BUSHY[node]), node] if node >= 0 else []


@pytest.mark.parametrize("size", [1, 7, 16, 65])
def test_chunks_of_any_size_give_the_same_rows(runner: NativeRunner, size: int) -> None:
    """200 tokens at once, and in chunks of `size`, give equal logits."""
    ids = tokens(200, seed=1)
    whole = in_chunks(runner, ids, 200, blocks(runner, 1, 200))
    assert not whole.isnan().any()
    assert torch.equal(in_chunks(runner, ids, size, blocks(runner, 20, 200)), whole)


def test_a_row_among_fifteen_others_is_the_row_alone(runner: NativeRunner) -> None:
    """A tree alone, and among 15 sequences that prefill, decode and verify, gives equal logits wherever it stands."""
    ids, nodes = tokens(90, seed=2), tokens(len(BUSHY), seed=3)
    table = blocks(runner, 1, 112)
    in_chunks(runner, ids[:89], 89, table)
    here = BatchEntry(89, ids[89:], table, nodes, BUSHY, logits_from=0)
    alone = run(runner, here)
    assert not alone.isnan().any()
    others, next_block = [], 10
    for i in range(15):
        length, new = 1 + 9 * i, (1, 5, 30)[i % 3]
        other = tokens(length + new, seed=10 + i)
        other_table = blocks(runner, next_block, len(other))
        next_block += len(other_table)
        in_chunks(runner, other[:length], length, other_table)
        others.append(BatchEntry(length, other[length:], other_table, logits_from=0))
    for place in (0, 7, 15):
        before = sum(len(other.chain) for other in others[:place])
        among = run(runner, *others[:place], here, *others[place:])
        assert torch.equal(among[before : before + len(alone)], alone)


@pytest.mark.parametrize("base", [2, 15, 16, 17, 63, 119])
def test_tree_rows_equal_their_paths_committed(runner: NativeRunner, base: int) -> None:
    """Each node of a bushy tree has the logits of its path as a chain, also across tiles and blocks."""
    ids, nodes = tokens(base, seed=4), tokens(len(BUSHY), seed=5)
    table = blocks(runner, 1, base + len(BUSHY))
    in_chunks(runner, ids[:-1], base, table)
    tree = run(runner, BatchEntry(base - 1, ids[-1:], table, nodes, BUSHY, logits_from=0))
    for node in range(len(BUSHY)):
        path = [nodes[i] for i in path_to(node)]
        committed = in_chunks(runner, ids + path, base + len(path), blocks(runner, 60, base + len(BUSHY)))
        assert torch.equal(tree[node + 1], committed[-1])


def test_what_stands_in_foreign_blocks_changes_nothing(runner: NativeRunner) -> None:
    """Garbage beyond a sequence's end, within its last block and in all others, leaves its logits as they were."""
    ids, table = tokens(70, seed=6), blocks(runner, 3, 80)
    clean = in_chunks(runner, ids, 70, table)[-1]
    for garbage in (np.inf, -65504.0):
        runner.kv_pool.keys[...] = garbage
        runner.kv_pool.values[...] = garbage
        assert torch.equal(in_chunks(runner, ids, 70, table)[-1], clean)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_threads_and_instruction_sets_change_nothing(
    quantization: str, model_of: ModelOf, make_runner: MakeRunner
) -> None:
    """One thread or five, and every instruction set of this processor, give equal logits."""
    ids, nodes = tokens(75, seed=7), tokens(len(BUSHY), seed=8)
    results = []
    names = [name for name, number in ISAS.items() if number in supported_isas()]
    for name, num_threads in [*((name, 2) for name in names), (names[-1], 1), (names[-1], 5)]:
        runner = make_runner(model_of("qwen3"), quantization=quantization, isa=name, num_threads=num_threads)
        table = blocks(runner, 1, NUM_BLOCKS)
        prefix = in_chunks(runner, ids[:-1], 31, table)
        tree = run(runner, BatchEntry(74, ids[-1:], table, nodes, BUSHY, logits_from=0))
        results.append(torch.cat([prefix, tree]))
    assert all(torch.equal(result, results[0]) for result in results)


def test_block_size_changes_nothing(model_of: ModelOf, make_runner: MakeRunner) -> None:
    """Blocks of 16 and of 48 tokens give equal logits."""
    ids = tokens(130, seed=9)
    small = make_runner(model_of("llama"), block_size=16)
    large = make_runner(model_of("llama"), block_size=48)
    assert torch.equal(
        in_chunks(small, ids, 60, blocks(small, 1, 130)), in_chunks(large, ids, 33, blocks(large, 1, 130))
    )
