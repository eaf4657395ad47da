"""EAGLE-3: answers are the target's alone, and the head's cache says the same as everything computed afresh."""

from __future__ import annotations

import random

import pytest
import torch

from draft import backlog
from draft.config import Eagle3Config, FirstConfig, NgramConfig, NoSpeculation, SpeculationConfig
from draft.eagle3 import Eagle3Proposer
from draft.ngram import NgramProposer
from draft.proposer import DraftContext, Features
from draft.roster import Roster
from draft.tree import Draft
from speculation.controller import DraftLengthController
from speculation.cost_model import StepCostModel
from speculation.engine import Engine
from speculation.messages import SamplingParams
from target.layout import BatchEntry, lay_out
from tests.speculation.running import Run
from tests.speculation.test_exactness import SAMPLINGS, assert_exact, requests_of
from tests.tiny_head import tiny_architecture, tiny_head
from tests.tiny_model import TINY, tiny_runner

CHAIN = Eagle3Config(num_speculative_tokens=3)
TREE = Eagle3Config(num_speculative_tokens=4, tree_size=12)
AUTO = Eagle3Config()
NGRAM = NgramConfig(num_speculative_tokens=4, min_n=1, max_n=2)
FIRST = FirstConfig(proposers=(NGRAM, TREE))


def proposer_with(
    num_blocks: int = 200, *, block_size: int = 4, max_catch_up_tokens: int = 512, max_pairs_behind: int = 1 << 20
) -> Eagle3Proposer:
    return Eagle3Proposer(
        tiny_head(num_blocks=num_blocks, block_size=block_size),
        eos_token_ids=TINY.eos_token_ids,
        max_catch_up_tokens=max_catch_up_tokens,
        max_pairs_behind=max_pairs_behind,
    )


def run_with(proposer: Eagle3Proposer, *, num_blocks: int = 200, block_size: int = 4, budget: int = 64) -> Run:
    engine = Engine(
        tiny_runner(num_blocks=num_blocks, block_size=block_size),
        Roster({"ngram": NgramProposer(), "eagle3": proposer}),
        DraftLengthController(StepCostModel()),
        model_fingerprint="tiny",
        default_config=NoSpeculation(),
        max_num_seqs=8,
        max_num_batched_tokens=budget,
        max_waiting=100,
    )
    return Run(engine)


@pytest.mark.parametrize("params", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize(("block_size", "budget", "catch_up"), [(1, 16, 512), (4, 64, 3), (16, 5, 512)])
def test_mixed_batches_say_what_each_says_alone(
    params: SamplingParams, block_size: int, budget: int, catch_up: int
) -> None:
    """Chains, trees, sizes left to the controller, other methods and none in one batch equal the plain loop."""
    configs: list[SpeculationConfig] = [CHAIN, TREE, NoSpeculation(), AUTO, NGRAM, FIRST, TREE]
    proposer = proposer_with(block_size=block_size, max_catch_up_tokens=catch_up)
    run = run_with(proposer, block_size=block_size, budget=budget)
    assert_exact(run, requests_of(params, configs))
    assert run.engine.stats().counters["draft_tokens"] > 20
    assert proposer.pool.num_in_use == 0
    proposer.pool.check()


@pytest.mark.parametrize("params", SAMPLINGS.values(), ids=SAMPLINGS)
def test_preemption_and_prefix_hits_change_nothing(params: SamplingParams) -> None:
    """In pools too small for all, the head's own too, with prompts that share a prefix, answers are plain."""
    proposer = proposer_with(40)
    run = run_with(proposer, num_blocks=24)
    assert_exact(run, requests_of(params, [CHAIN, TREE, CHAIN, TREE, NoSpeculation(), AUTO], shared=9))
    stats = run.engine.stats()
    assert stats.counters["preemptions"] > 0
    assert stats.counters["cached_tokens"] > 0
    assert stats.counters["draft_tokens"] > 20
    assert proposer.pool.num_in_use == 0


def features_of(token_ids: list[int]) -> torch.Tensor:
    """[n, columns] what the tiny model computes at each token, all at once."""
    entry = BatchEntry(0, token_ids, range(1, 60))
    output = tiny_runner().forward(lay_out([entry], 4, tiny_architecture().feature_layers)).features
    assert output is not None
    return output.double()


def drafts_by(proposer: Eagle3Proposer, token_ids: list[int], chunks: list[tuple[int, int]]) -> list[Draft]:
    """What is drafted behind `token_ids`, whose features come in the chunks [first, last), for a chain and a tree."""
    states = features_of(token_ids)
    proposer.start(0, token_ids)
    for first, last in chunks:
        proposer.commit(0, [], Features(first, states[first:last]))
    greedy = SamplingParams(temperature=0.0)
    drafts = [
        proposer.propose([DraftContext(0, token_ids, len(token_ids), greedy, config)], [limit])[0]
        for config, limit in ((CHAIN, 3), (TREE, 12), (CHAIN, 3))
    ]
    assert drafts[0] == drafts[2]
    proposer.finish(0)
    return drafts


def test_its_cache_says_what_everything_computed_afresh_says() -> None:
    """However features arrive, doubled by preemptions, in chunks or at once, the draft is the same."""
    rng = random.Random(5)
    token_ids = [rng.randrange(TINY.vocab_size) for _ in range(40)]
    expected = drafts_by(proposer_with(), token_ids, [(0, 39)])
    assert len(expected[0]) == 3
    assert len(expected[1]) == 12
    assert not expected[1].is_chain
    for chunks in ([(0, 5), (5, 39)], [(0, 20), (3, 39)], [(0, 39), (0, 39)], [(i, i + 1) for i in range(39)]):
        assert drafts_by(proposer_with(max_catch_up_tokens=512), token_ids, chunks) == expected


def test_chances_fall_along_every_path_and_chains_are_trees_of_width_one() -> None:
    """A node is never likelier than its parent; the likeliest child of the root begins the chain."""
    token_ids = list(range(20))
    chain, tree, _ = drafts_by(proposer_with(), token_ids, [(0, 19)])
    for draft in (chain, tree):
        assert draft.confidences is not None
        for node, parent in enumerate(draft.parents):
            assert draft.confidences[node] <= (draft.confidences[parent] if parent >= 0 else 1.0)
    assert chain.token_ids[0] == tree.token_ids[0]


def test_a_prefix_hit_is_made_up_for_by_the_head_s_own_cache() -> None:
    """Where the target skipped a prefix that the head has seen, it drafts as if it had all features."""
    token_ids = list(range(30))
    proposer = proposer_with()
    expected = drafts_by(proposer, token_ids, [(0, 29)])
    assert drafts_by(proposer, token_ids, [(16, 29)]) == expected
    elsewhere = drafts_by(proposer_with(), token_ids, [(16, 29)])
    assert elsewhere != expected
    assert len(elsewhere[0]) == 3


@pytest.mark.parametrize("size", [1, 3, 39])
def test_what_is_too_far_behind_is_given_up(size: int) -> None:
    """A head that may be 10 pairs behind drafts as if the target's features began late, however they arrive."""
    token_ids = [7 * i % 59 for i in range(40)]
    chunks = [(i, min(i + size, 39)) for i in range(0, 39, size)]
    proposer = proposer_with(max_pairs_behind=10)
    found = drafts_by(proposer, token_ids, chunks)
    starts = [drafts_by(proposer_with(), token_ids, [(first, 39)]) for first in range(24, 30)]
    assert found in starts
    assert found != drafts_by(proposer_with(), token_ids, [(0, 39)])


def test_a_head_that_nobody_asks_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features are kept as they come, up to a bound; what the head makes of them waits until a draft is wanted."""
    proposer, fused = proposer_with(), list[int]()
    fuse = proposer._head.fuse

    def counted(states: torch.Tensor) -> torch.Tensor:
        fused.append(len(states))
        return fuse(states)

    monkeypatch.setattr(proposer._head, "fuse", counted)
    token_ids = list(range(40))
    states = features_of(token_ids)
    proposer.start(0, token_ids)
    for i in range(39):
        proposer.commit(0, [], Features(i, states[i : i + 1]))
    assert fused == []
    context = DraftContext(0, token_ids, 40, SamplingParams(temperature=0.0), CHAIN)
    assert proposer.propose([context], [3])[0]
    assert fused == [39]


def test_what_is_kept_of_features_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raw features are fused as they become many, to a third of their size; drafts are the same."""
    token_ids = list(range(50))
    expected = drafts_by(proposer_with(), token_ids, [(0, 49)])
    monkeypatch.setattr(backlog, "FUSE_AT", 10)
    proposer = proposer_with()
    found = drafts_by(proposer, token_ids, [(i, i + 7) for i in range(0, 49, 7)])
    assert [(draft.token_ids, draft.parents) for draft in found] == [
        (draft.token_ids, draft.parents) for draft in expected
    ]


def test_tenants_do_not_share_the_head_s_cache() -> None:
    """Another salt, or another first token, finds nothing of what the head has cached."""
    proposer = proposer_with()
    token_ids = list(range(30))
    drafts_by(proposer, token_ids, [(0, 29)])
    for seq_id, (prompt, salt) in enumerate(((token_ids, "other"), ([7, *token_ids[1:]], ""))):
        proposer.start(seq_id, prompt, cache_salt=salt)
        proposer.commit(seq_id, [], Features(16, features_of(prompt)[16:29]))
        context = DraftContext(seq_id, prompt, 30, SamplingParams(temperature=0.0), CHAIN)
        assert proposer.propose([context], [3])[0]
        assert proposer._states[seq_id].base == 16


def test_without_features_it_says_so() -> None:
    """Before the features of the token before the newest are known, a draft is skipped as not_ready."""
    proposer = proposer_with()
    proposer.start(0, [1, 2, 3])
    context = DraftContext(0, [1, 2, 3], 3, SamplingParams(), CHAIN)
    assert proposer.propose([context], [3])[0].skipped == "not_ready"
    proposer.commit(0, [], Features(0, features_of([1, 2, 3])[:1]))
    assert proposer.propose([context], [3])[0].skipped == "not_ready"
    proposer.commit(0, [], Features(1, features_of([1, 2, 3])[1:2]))
    assert len(proposer.propose([context], [3])[0]) == 3


def test_verbs_out_of_order_are_refused() -> None:
    """Starting twice, proposing before committing, and speaking of what was not started raise."""
    proposer = proposer_with()
    proposer.start(1, [1, 2])
    with pytest.raises(ValueError, match="started already"):
        proposer.start(1, [1, 2])
    with pytest.raises(ValueError, match="commit comes before propose"):
        proposer.propose([DraftContext(1, [1, 2, 3], 2, SamplingParams(), CHAIN)], [2])
    with pytest.raises(ValueError, match="not started"):
        proposer.commit(2, [1], None)
    with pytest.raises(ValueError, match="not started"):
        proposer.finish(2)
