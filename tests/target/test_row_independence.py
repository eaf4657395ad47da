"""A row's logits depend on what it sees alone, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from target.layout import BatchEntry
from target.load import load_runner
from target.runner import Runner
from target.torch_runner import TorchRunner
from tests.target.conftest import make_model
from tests.target.forwards import blocks, in_chunks, run, tokens

NUM_BLOCKS = 200
BUSHY = (-1, 0, 0, 1, -1, 4, 3, 2, 6, 8, 9, 5, 10)
"""Parents of a tree whose nodes do not stand in the order of any path."""

MODELS = [("smollm", "float32"), ("mistral", "float32"), ("smollm", "float64"), ("qwen3", "float16")]


@pytest.fixture(scope="module", params=MODELS, ids="-".join)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """A runner of a tiny model: with all keys visible, with a window, in double and in half precision."""
    family, dtype = request.param
    folder = tmp_path_factory.mktemp("model")
    make_model(family).save_pretrained(folder)
    return load_runner(folder, num_blocks=NUM_BLOCKS, backend="torch", dtype=dtype)


def path_to(node: int, parents: tuple[int, ...]) -> list[int]:
    """The nodes from the root to `node`, it included."""
    return [*path_to(parents[node], parents), node] if node >= 0 else []


@pytest.mark.parametrize("size", [1, 7, 16])
def test_chunks_of_any_size_give_the_same_rows(runner: Runner, size: int) -> None:
    """300 tokens at once, and in chunks of `size`, give equal logits."""
    ids = tokens(300, seed=1)
    table = blocks(runner, 1, 300)
    assert torch.equal(in_chunks(runner, ids, size, table), in_chunks(runner, ids, 300, table))


def test_rows_do_not_see_their_neighbours(runner: Runner) -> None:
    """A sequence alone, and among 15 others of all lengths that prefill, decode and verify, gives equal logits."""
    ids = tokens(137, seed=2)
    table = blocks(runner, 1, 150)
    in_chunks(runner, ids[:130], 130, table)
    alone = run(runner, BatchEntry(130, ids[130:131], table, ids[131:], range(-1, 5), logits_from=0))
    others = []
    next_block = 12
    for i in range(15):
        length, new = 900 if i == 14 else 1 + 9 * i, (1, 5, 30)[i % 3]
        other = tokens(length + new, seed=10 + i)
        other_table = blocks(runner, next_block, len(other))
        next_block += len(other_table)
        in_chunks(runner, other[:length], length, other_table)
        others.append(BatchEntry(length, other[length:], other_table, logits_from=0))
    here = BatchEntry(130, ids[130:131], table, ids[131:], range(-1, 5), logits_from=0)
    for place in (0, 7, 15):
        before = sum(len(other.chain) for other in others[:place])
        among = run(runner, *others[:place], here, *others[place:])
        assert torch.equal(among[before : before + len(alone)], alone)


@pytest.mark.parametrize("base", [2, 17, 119, 127, 128, 129, 252])
def test_tree_rows_equal_their_paths_committed(runner: Runner, base: int) -> None:
    """Each node of a bushy tree has the logits of its path as a chain, also across key blocks."""
    ids, nodes = tokens(base, seed=3), tokens(len(BUSHY), seed=4)
    table = blocks(runner, 1, base + len(BUSHY))
    in_chunks(runner, ids[:-1], base, table)
    tree = run(runner, BatchEntry(base - 1, ids[-1:], table, nodes, BUSHY, logits_from=0))
    other = blocks(runner, 60, base + len(BUSHY))
    for node in range(len(BUSHY)):
        path = [nodes[i] for i in path_to(node, BUSHY)]
        committed = in_chunks(runner, ids + path, base + len(path), other)
        assert torch.equal(tree[node + 1], committed[-1])


def test_chain_drafts_equal_committed_tokens(runner: Runner) -> None:
    """A tree without branches, a step of single tokens, and a prefill give equal logits."""
    ids = tokens(140, seed=5)
    table = blocks(runner, 1, 140)
    whole = in_chunks(runner, ids, 140, table)
    other = blocks(runner, 60, 140)
    in_chunks(runner, ids[:124], 124, other)
    verified = run(runner, BatchEntry(124, ids[124:125], other, ids[125:], range(-1, 14), logits_from=0))
    assert torch.equal(verified, whole[124:])


def test_garbage_elsewhere_does_not_leak(runner: Runner) -> None:
    """NaN in the null block, in free blocks and behind a sequence's end changes nothing."""
    assert isinstance(runner, TorchRunner)
    ids, nodes = tokens(135, seed=6), tokens(len(BUSHY), seed=7)
    table = blocks(runner, 1, 135 + len(BUSHY))
    in_chunks(runner, ids[:134], 134, table)
    entry = BatchEntry(134, ids[134:], table, nodes, BUSHY, logits_from=0)
    clean = run(runner, entry)
    computed = [table[i // 16] * 16 + i % 16 for i in range(134)]
    kept = torch.zeros(runner.kv_pool.zero_slot + 1, dtype=torch.bool)
    kept[computed] = True
    kept[runner.kv_pool.zero_slot] = True
    runner.kv_pool.entries[:, :, ~kept] = torch.nan
    dirty = run(runner, entry)
    runner.kv_pool.entries.zero_()
    assert torch.equal(dirty, clean)


def test_moved_entries_continue_the_sequence(runner: Runner) -> None:
    """After an accepted branch's entries are moved into place, the next token's logits are those of plain decoding."""
    ids, nodes = tokens(126, seed=8), tokens(len(BUSHY), seed=9)
    table = blocks(runner, 1, 160)
    in_chunks(runner, ids[:125], 125, table)
    run(runner, BatchEntry(125, ids[125:], table, nodes, BUSHY, logits_from=0))
    path = path_to(9, BUSHY)
    slots = [table[i // 16] * 16 + i % 16 for i in range(160)]
    runner.kv_pool.move([slots[126 + node] for node in path], [slots[126 + i] for i in range(len(path))])
    accepted = ids + [nodes[node] for node in path]
    continued = run(runner, BatchEntry(len(accepted), [42], table, logits_from=0))
    plain = in_chunks(runner, [*accepted, 42], 16, blocks(runner, 60, 160))
    assert torch.equal(continued[0], plain[-1])


def test_real_weights_have_independent_rows(embedded_folder: Path) -> None:
    """The embedded model on two threads: a decoded, a verified and a chunked row equal those of one prefill."""
    torch.set_num_threads(2)
    runner = load_runner(embedded_folder, num_blocks=40, backend="torch")
    ids = tokens(150, seed=1, vocab_size=49152)
    whole = in_chunks(runner, ids, 150, range(1, 11))
    table = range(11, 21)
    in_chunks(runner, ids[:120], 120, table)
    decoded = run(runner, BatchEntry(120, ids[120:121], table, logits_from=0))
    verified = run(runner, BatchEntry(121, ids[121:122], table, ids[122:130], range(-1, 7), logits_from=0))
    others = [BatchEntry(0, tokens(5 + i, i, 49152), [21 + i], logits_from=0) for i in range(8)]
    among = run(runner, *others, BatchEntry(130, ids[130:], table, logits_from=0))
    assert torch.equal(torch.cat([decoded, verified]), whole[120:130])
    assert torch.equal(among[-20:], whole[130:])
