"""Medusa: answers are the target's alone, heads guess as their layout says, and bad folders are named."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from draft.config import MedusaConfig, NgramConfig, NoSpeculation, SpeculationConfig
from draft.medusa import MedusaProposer
from draft.medusa_heads import MedusaHeads
from draft.ngram import NgramProposer
from draft.proposer import DraftContext, Features
from draft.roster import Roster
from speculation.controller import DraftLengthController
from speculation.cost_model import StepCostModel
from speculation.engine import Engine
from speculation.messages import SamplingParams
from target.errors import CheckpointError
from tests.recorded_graphs import record_graphs
from tests.speculation.running import Run
from tests.speculation.test_exactness import SAMPLINGS, assert_exact, requests_of
from tests.tiny_medusa import tiny_tables, write_tiny_medusa
from tests.tiny_model import TINY, tiny_runner

CHAIN = MedusaConfig(num_speculative_tokens=3)
TREE = MedusaConfig(num_speculative_tokens=4, tree_size=12)
GREEDY = SamplingParams(temperature=0.0)


def heads_of(folder: Path) -> MedusaHeads:
    return MedusaHeads(folder, tiny_tables(), torch.float64, torch.device("cpu"))


@pytest.fixture
def proposer(tmp_path: Path) -> MedusaProposer:
    return MedusaProposer(heads_of(write_tiny_medusa(tmp_path)), eos_token_ids=TINY.eos_token_ids)


@pytest.mark.parametrize("params", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("num_blocks", [24, 200])
def test_mixed_batches_say_what_each_says_alone(
    proposer: MedusaProposer, params: SamplingParams, num_blocks: int
) -> None:
    """Chains, trees, sizes left to the controller and other methods equal the plain loop, preempted or not."""
    engine = Engine(
        tiny_runner(num_blocks=num_blocks),
        Roster({"ngram": NgramProposer(), "medusa": proposer}),
        DraftLengthController(StepCostModel()),
        model_fingerprint="tiny",
        default_config=NoSpeculation(),
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_waiting=100,
    )
    run = Run(engine)
    configs: list[SpeculationConfig] = [CHAIN, TREE, NoSpeculation(), MedusaConfig(), NgramConfig(), TREE]
    assert_exact(run, requests_of(params, configs, shared=9))
    assert engine.stats().counters["draft_tokens"] > 20
    assert (engine.stats().counters["preemptions"] > 0) == (num_blocks == 24)


def test_a_tree_is_the_likeliest_paths_through_the_heads(tmp_path: Path) -> None:
    """Logits are those of residual blocks and output rows; the draft has the likeliest products of their softmax."""
    folder = write_tiny_medusa(tmp_path, num_layers=2)
    tensors = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    state = torch.randn(TINY.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    chances = []
    for i in range(4):
        x = state
        for j in range(2):
            x = x + functional.silu(tensors[f"{i}.{j}.linear.weight"] @ x + tensors[f"{i}.{j}.linear.bias"])
        chances.append((tensors[f"{i}.2.weight"] @ x).softmax(-1))
    proposer = MedusaProposer(heads_of(folder), eos_token_ids=())
    proposer.start(0, [1, 2, 3])
    proposer.commit(0, [], Features(0, torch.stack([state * 0, state])))
    draft = proposer.propose([DraftContext(0, [1, 2, 3], 3, GREEDY, TREE)], [12])[0]
    assert len(draft) == 12
    assert draft.confidences is not None
    for node in range(12):
        path, at = [], node
        while at >= 0:
            path.append(draft.token_ids[at])
            at = draft.parents[at]
        expected = 1.0
        for depth, token_id in enumerate(reversed(path)):
            expected *= float(chances[depth][token_id])
        assert draft.confidences[node] == pytest.approx(expected)
    best = max(float(chances[0].max()), *draft.confidences)
    assert draft.confidences[0] == pytest.approx(best)
    chain = proposer.propose([DraftContext(0, [1, 2, 3], 3, GREEDY, CHAIN)], [3])[0]
    assert list(chain.token_ids) == [int(chance.argmax()) for chance in chances[:3]]


def test_it_drafts_only_behind_the_newest_token(proposer: MedusaProposer) -> None:
    """Without the hidden state of the token before the newest, a draft is skipped as not_ready."""
    proposer.start(0, [1, 2, 3])
    context = DraftContext(0, [1, 2, 3], 3, GREEDY, CHAIN)
    states = torch.randn(2, TINY.hidden_size, dtype=torch.float64)
    assert proposer.propose([context], [3])[0].skipped == "not_ready"
    proposer.commit(0, [], Features(0, states[:1]))
    assert proposer.propose([context], [3])[0].skipped == "not_ready"
    proposer.commit(0, [], Features(1, states[1:]))
    assert len(proposer.propose([context], [3])[0]) == 3


def test_output_rows_left_out_are_the_target_s(tmp_path: Path) -> None:
    """A folder without output rows uses the target's own."""
    heads = heads_of(write_tiny_medusa(tmp_path, num_layers=0, own_rows=False))
    state = torch.randn(1, TINY.hidden_size, dtype=torch.float64)
    torch.testing.assert_close(heads.forward(state, 1)[0, 0], (state @ tiny_tables().lm_head.T)[0])


def test_typical_acceptance_is_ignored_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Thresholds that would accept what the target did not say have no effect here, and are named."""
    with caplog.at_level(logging.WARNING):
        heads_of(write_tiny_medusa(tmp_path, posterior_threshold=0.09))
    assert "posterior_threshold" in caplog.text


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    """A number of heads that is none, a missing tensor and one of another shape."""
    with pytest.raises(CheckpointError, match="medusa_num_heads is 0; it must be 1 to 32"):
        heads_of(write_tiny_medusa(tmp_path / "a", medusa_num_heads=0))
    with pytest.raises(CheckpointError, match=r"the tensor 4.0.linear.weight is missing"):
        heads_of(write_tiny_medusa(tmp_path / "b", medusa_num_heads=5))
    folder = write_tiny_medusa(tmp_path / "c")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"0.1.weight": torch.zeros(50, 16)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"0.1.weight has shape \[50, 16\]"):
        heads_of(folder)


def test_captured_heads_guess_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of sequences, at any depth, gets the logits that heads give which are not captured."""
    recorded = record_graphs(monkeypatch)
    plain, captured = heads_of(write_tiny_medusa(tmp_path)), heads_of(tmp_path)
    captured.graphs.enabled = True
    generator = torch.Generator().manual_seed(1)
    kept = []
    for num_sequences, depth in ((3, 2), (16, 2), (5, 2), (1, 4), (2, 4), (20, 4), (300, 1)):
        states = torch.randn(num_sequences, TINY.hidden_size, generator=generator)
        kept.append((captured.forward(states, depth), plain.forward(states, depth)))
    for ours, theirs in kept:
        torch.testing.assert_close(ours, theirs)
    assert {kind: graph.num_replays for kind, graph in recorded.items()} == {(16, 2): 2, (16, 4): 1}
