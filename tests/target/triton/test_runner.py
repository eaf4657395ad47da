"""A whole decoder of Triton kernels, in the interpreter."""

from __future__ import annotations

import msgspec
import pytest
import torch

from target.config import ModelConfig
from target.layout import BatchEntry, lay_out
from target.torch_runner import TorchRunner
from target.triton.runner import TritonRunner
from tests.target.forwards import in_chunks, run, tokens
from tests.tiny_model import TINY, tiny_weights

CONFIG = msgspec.structs.replace(TINY, head_size=16)
TREE = (-1, 0, 0, 1, -1, 4)


def runner_of(kind: type[TorchRunner | TritonRunner], config: ModelConfig = CONFIG) -> TorchRunner | TritonRunner:
    weights = tiny_weights(config, dtype=torch.float32)
    device = torch.device("cpu")
    return kind(config, weights, num_blocks=20, block_size=16, max_model_len=256, device=device)


@pytest.mark.parametrize("window", [None, 9])
def test_a_decoder_agrees_with_torch(window: int | None) -> None:
    """A prompt, then a step that verifies a tree beside a new prompt, have the logits and features of torch."""
    config = msgspec.structs.replace(CONFIG, sliding_window=window)
    results = []
    for kind in (TorchRunner, TritonRunner):
        runner = runner_of(kind, config)
        ids = tokens(20, seed=1, vocab_size=61)
        prompt = lay_out([BatchEntry(0, ids, [3, 1], logits_from=0)], 16, (0, 2, -1))
        output = runner.forward(prompt)
        assert output.features is not None
        step = BatchEntry(20, [7], [3, 1], tokens(6, 2, 61), TREE, logits_from=0)
        following = run(runner, step, BatchEntry(0, ids[:5], [4], logits_from=4))
        results.append(torch.cat([x.ravel() for x in (output.logits, output.features, following)]))
    assert torch.allclose(results[0], results[1], atol=2e-4)


def test_rows_of_a_decoder_are_independent() -> None:
    """20 tokens at once, and in chunks of 7, give equal logits; so does a step among others."""
    runner = runner_of(TritonRunner)
    ids = tokens(20, seed=1, vocab_size=61)
    whole = in_chunks(runner, ids, 20, [1, 2])
    assert torch.equal(in_chunks(runner, ids, 7, [3, 4]), whole)
    others = [BatchEntry(0, ids[:3], [5], logits_from=0), BatchEntry(0, ids[:9], [6], logits_from=0)]
    among = run(runner, others[0], BatchEntry(19, ids[19:], [1, 2], logits_from=0), others[1])
    assert torch.equal(among[3], whole[19])


@pytest.mark.usefixtures("device_product")
def test_a_quantised_decoder_is_near_the_float_one() -> None:
    """With 8-bit weights a prompt's logits are near those without, and bitwise the same in chunks."""
    config = msgspec.structs.replace(CONFIG, hidden_size=64, intermediate_size=96)
    weights, device = tiny_weights(config, dtype=torch.float32), torch.device("cpu")
    whole, fp8 = (
        TritonRunner(
            config, weights, num_blocks=20, block_size=16, max_model_len=256, device=device, quantization=quantization
        )
        for quantization in ("none", "fp8")
    )
    assert "products by fp8" in fp8.description
    ids = tokens(20, seed=1, vocab_size=61)
    theirs, ours = (in_chunks(runner, ids, 20, [1, 2]) for runner in (whole, fp8))
    assert 0.001 < (ours - theirs).std() / theirs.std() < 0.5
    assert torch.equal(in_chunks(fp8, ids, 7, [3, 4]), ours)


def test_results_outlive_the_next_step() -> None:
    """Logits that a caller keeps are not overwritten by the step that follows."""
    runner = runner_of(TritonRunner)
    first = run(runner, BatchEntry(0, [1, 2, 3], [1], logits_from=0))
    kept = first.clone()
    run(runner, BatchEntry(0, [4, 5, 6], [1], logits_from=0))
    assert torch.equal(first, kept)
