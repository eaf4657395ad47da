"""Steps that are replayed say what steps say that are computed: everything they read lies where graphs find it."""

from __future__ import annotations

import msgspec
import pytest
import torch

from draft.config import DraftModelConfig
from draft.draft_model import DraftModelProposer
from draft.eagle3_graphed import GraphedEagle3Head
from draft.proposer import DraftContext
from target.layout import BatchEntry, lay_out
from target.sampling_params import SamplingParams
from target.triton.runner import TritonRunner
from tests.recorded_graphs import record_graphs
from tests.target.forwards import run, tokens
from tests.tiny_head import tiny_architecture, tiny_head, tiny_head_weights
from tests.tiny_model import TINY, tiny_weights

CONFIG = msgspec.structs.replace(TINY, head_size=16)
TREE = (-1, 0, 0, 1)


def runner_of(*, graphs: bool) -> TritonRunner:
    weights = tiny_weights(CONFIG, dtype=torch.float32)
    device = torch.device("cpu")
    runner = TritonRunner(CONFIG, weights, num_blocks=40, block_size=16, max_model_len=256, device=device)
    runner.graphs.enabled = graphs
    return runner


def test_replayed_steps_of_a_model_are_those_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, single tokens and trees, whose kinds are captured and replayed, have equal logits and features."""
    recorded = record_graphs(monkeypatch)
    found = []
    for graphs in (False, True):
        runner = runner_of(graphs=graphs)
        outputs = []
        for i in range(5):
            ids = tokens(5 + i, seed=i, vocab_size=61)
            prompt = runner.forward(lay_out([BatchEntry(0, ids, [1 + i], logits_from=0)], 16, (0, -1)))
            assert prompt.features is not None
            step = BatchEntry(len(ids), [i], [1 + i], tokens(4, i, 61), TREE, logits_from=0)
            other = BatchEntry(0, ids[:3], [20 + i], logits_from=2)
            outputs += [prompt.logits, prompt.features, run(runner, step, other)]
        found.append(outputs)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert {kind: graph.num_replays for kind, graph in recorded.items()} == {(16, 16, (0, -1)): 4, (16, 16, ()): 4}


def test_a_captured_draft_model_drafts_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guess by guess, for a sequence that grows."""
    recorded = record_graphs(monkeypatch)
    found = []
    for graphs in (False, True):
        proposer = DraftModelProposer(
            runner_of(graphs=graphs), model_fingerprint="tiny", vocab_size=61, eos_token_ids=()
        )
        ids = tokens(12, seed=3, vocab_size=61)
        proposer.start(0, ids)
        drafts = []
        for i in range(4):
            context = DraftContext(0, ids, 12, SamplingParams(temperature=0.0), DraftModelConfig())
            (draft,) = proposer.propose([context], [3])
            ids = [*ids, *draft.token_ids[: i % 3], i]
            proposer.commit(0, [*draft.token_ids[: i % 3], i], None)
            drafts.append(draft)
        found.append(drafts)
    assert found[0] == found[1]
    assert sum(graph.num_replays for graph in recorded.values()) > 6


@pytest.mark.parametrize("qk_norm", [True, False])
def test_a_captured_eagle3_head_guesses_the_same(qk_norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of prompts, then outputs that go on in place of features: logits and outputs are the plain head's."""
    recorded = record_graphs(monkeypatch)
    architecture = tiny_architecture(CONFIG, qk_norm=qk_norm, norm_before_residual=qk_norm)
    weights = tiny_head_weights(architecture, dtype=torch.float32)
    graphed = GraphedEagle3Head(architecture, weights, num_blocks=40, block_size=16)
    graphed.graphs.enabled = True
    plain = tiny_head(architecture, num_blocks=40, block_size=16, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for i in range(4):
        ids = tokens(7 + i, seed=i, vocab_size=61)
        states = torch.randn(len(ids), 3 * CONFIG.hidden_size, generator=generator)
        first = lay_out([BatchEntry(0, ids, [1 + i], logits_from=len(ids) - 2)], 16)
        behind = lay_out([BatchEntry(0, ids[:4], [20 + i])], 16)
        level = [BatchEntry(len(ids) - 1, ids[-1:], [1 + i], ids[:3], (-1, -1, 0), logits_from=1)]
        said = []
        for head in (plain, graphed):
            fused = head.fuse(states)
            logits, outputs = head.forward(first, fused)
            assert head.forward(behind, fused[:4])[0].shape == (0, 40)
            hidden = torch.cat((fused[-1:], outputs[-1:], outputs[:2]))
            said.append([logits, outputs, *head.forward(lay_out(level, 16), hidden)])
        for ours, theirs in zip(*said, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)
    assert sum(graph.num_replays for graph in recorded.values()) > 4
