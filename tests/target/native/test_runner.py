"""The native step against the torch path, which is its specification."""

from __future__ import annotations

import threading

import pytest
import torch

from target.layout import BatchEntry, lay_out
from tests.target.forwards import blocks, in_chunks, run, tokens
from tests.target.native.conftest import MakeRunner, ModelOf, as_quantised, torch_runner

FAMILIES = ["llama", "smollm", "llama3", "qwen2", "qwen3"]
TREE = (-1, 0, 0, 1, -1, 4, 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_unquantised_logits_are_those_of_the_torch_path(
    family: str, model_of: ModelOf, make_runner: MakeRunner
) -> None:
    """In float32, chunks, single tokens and trees differ by the rounding of a float16 cache alone."""
    model = model_of(family)
    ids, nodes = tokens(90, seed=1), tokens(len(TREE), seed=2)
    for runner in (native := make_runner(model, quantization="none"), specification := torch_runner(model)):
        in_chunks(runner, ids[:-1], 40, blocks(runner, 1, 100))
    last = BatchEntry(89, ids[89:], blocks(native, 1, 100), nodes, TREE, logits_from=0)
    ours, theirs = run(native, last), run(specification, last)
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=0)
    assert (ours - theirs).abs().max() < 2e-3 * theirs.abs().max()


@pytest.mark.parametrize("quantization", ["int8", "q4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_quantised_logits_are_those_of_the_weights_they_stand_for(
    family: str, quantization: str, model_of: ModelOf, make_runner: MakeRunner
) -> None:
    """With the dequantised weights in the torch path, only the rounding of activations is left."""
    config, weights = model_of(family)
    ids = tokens(120, seed=3)
    native = make_runner((config, weights), quantization=quantization)
    ours = in_chunks(native, ids, 50, blocks(native, 1, 120))
    specification = torch_runner((config, as_quantised(weights, quantization)))
    theirs = in_chunks(specification, ids, 120, blocks(specification, 1, 120))
    error = (ours - theirs).norm() / theirs.norm()
    assert error < {"int8": 2e-3, "q4": 4e-2}[quantization]


def test_features_are_the_hidden_states_of_the_torch_path(model_of: ModelOf, make_runner: MakeRunner) -> None:
    """Embedding, a middle layer, the last and the final norm's output come back for every row, in the asked order."""
    model = model_of("qwen3")
    native, specification = make_runner(model, quantization="none"), torch_runner(model)
    batch = lay_out([BatchEntry(0, tokens(37, seed=4), blocks(native, 1, 40), logits_from=36)], 16, (2, 0, -1, 1))
    ours, theirs = native.forward(batch).features, specification.forward(batch).features
    assert ours is not None
    assert theirs is not None
    torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-3)


def test_a_batch_without_logits_writes_its_keys_and_values(model_of: ModelOf, make_runner: MakeRunner) -> None:
    """The chunks of a prompt that ask for nothing leave what the chunk that asks needs."""
    runner = make_runner(model_of("llama"), quantization="int8")
    ids, table = tokens(40, seed=5), blocks(runner, 1, 40)
    whole = in_chunks(runner, ids, 40, table)
    nothing = run(runner, BatchEntry(0, ids[:30], blocks(runner, 20, 40)))
    assert nothing.shape == (0, 211)
    assert torch.equal(run(runner, BatchEntry(30, ids[30:], blocks(runner, 20, 40), logits_from=0)), whole[30:])


def test_moved_entries_serve_like_computed_ones(model_of: ModelOf, make_runner: MakeRunner) -> None:
    """After a tree, moving the accepted path's entries into place equals having computed that path."""
    runner = make_runner(model_of("smollm"), quantization="q4")
    ids, nodes, path = tokens(30, seed=6), tokens(7, seed=7), (4, 5)
    table = blocks(runner, 1, 48)
    in_chunks(runner, ids[:29], 29, table)
    run(runner, BatchEntry(29, ids[29:], table, nodes, TREE, logits_from=0))
    slot = [table[i // 16] * 16 + i % 16 for i in range(48)]
    runner.kv_pool.move([slot[30 + node] for node in path], [slot[30], slot[31]])
    moved = run(runner, BatchEntry(32, [9], table, logits_from=0))
    chain = [*ids, *(nodes[node] for node in path), 9]
    assert torch.equal(moved, in_chunks(runner, chain, 11, blocks(runner, 50, 48))[-1:])


def test_move_swaps_as_if_all_at_once(model_of: ModelOf, make_runner: MakeRunner) -> None:
    """Entries that are each other's destination change places."""
    pool = make_runner(model_of("smollm"), quantization="q4").kv_pool
    pool.keys[...] = torch.arange(pool.keys.size).remainder(1000).numpy().reshape(pool.keys.shape)
    before = pool.keys.copy()
    pool.move([17, 40], [40, 17])
    assert (pool.keys[:, 1, :, :, 1] == before[:, 2, :, :, 8]).all()
    assert (pool.keys[:, 2, :, :, 8] == before[:, 1, :, :, 1]).all()


@pytest.mark.parametrize(
    ("start", "token_id", "message"), [(0, 211, "token_ids are 211"), (1024, 3, "positions are 1024")]
)
def test_what_lies_outside_the_tables_is_refused(
    start: int, token_id: int, message: str, model_of: ModelOf, make_runner: MakeRunner
) -> None:
    """A token or a position the model does not have is an error, not a read of foreign memory."""
    runner = make_runner(model_of("llama"))
    with pytest.raises(ValueError, match=message):
        run(runner, BatchEntry(start, [token_id], range(1, 66), logits_from=0))


def test_close_ends_the_threads(model_of: ModelOf, make_runner: MakeRunner) -> None:
    """A closed runner leaves no thread behind and says what is wrong when it is used."""
    runner = make_runner(model_of("llama"), num_threads=3)
    mine = [thread for thread in threading.enumerate() if thread.name.startswith("forerun-native")]
    assert len(mine) == 2
    runner.close()
    assert not any(thread.is_alive() for thread in mine)
    with pytest.raises(RuntimeError, match="closed"):
        run(runner, BatchEntry(0, [1], [1], logits_from=0))
