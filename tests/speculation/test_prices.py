"""What guesses are worth and cost, decision by decision: the draft-length controller on made-up steps."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft.config import (
    Eagle3Config,
    FirstConfig,
    NgramConfig,
    SpeculationConfig,
    SuffixConfig,
)
from draft.proposer import DraftContext
from draft.tree import Draft
from speculation.controller import DraftLengthController
from speculation.cost_model import StepCostModel, StepLoad
from speculation.simulate import parse_curve
from target.sampling_params import SamplingParams
from tests.speculation.test_controller import CPU


def context(seq_id: int, config: SpeculationConfig, temperature: float = 0.0) -> DraftContext:
    return DraftContext(seq_id, [1, 2, 3], 3, SamplingParams(temperature=temperature), config)


def controller_on(curve: str, num_sequences: int = 1) -> DraftLengthController:
    control = DraftLengthController(parse_curve(curve))
    control.begin(StepLoad(num_sequences))
    return control


@given(data=st.data(), size=st.integers(1, 30))
def test_trimmed_trees_are_trees_of_the_likeliest_nodes(data: st.DataObject, size: int) -> None:
    """What is kept of a tree has each node's parent, and nothing left out is likelier than a node kept."""
    parents = tuple(data.draw(st.integers(-1, i - 1)) for i in range(size))
    confidences: list[float] = []
    for parent in parents:
        confidences.append(
            (confidences[parent] if parent >= 0 else 1.0) * data.draw(st.sampled_from([0.1, 0.5, 0.9, 1.0]))
        )
    draft = Draft(tuple(range(size)), parents, "suffix", tuple(confidences), 4)
    control = controller_on(CPU)
    asking = context(0, SuffixConfig())
    control.appraise(asking, "suffix", draft)
    (kept,) = control.trim([asking], [draft])
    kept_nodes = list(kept.token_ids)
    assert kept_nodes == sorted(kept_nodes)
    for token_id, parent in zip(kept.token_ids, kept.parents, strict=True):
        assert parents[token_id] == (kept.token_ids[parent] if parent >= 0 else -1)
    chances = control.chances(asking, draft)
    left_out = [chances[i] for i in range(size) if i not in kept_nodes]
    assert max(left_out, default=0.0) <= min((chances[i] for i in kept_nodes), default=1.0)


def test_a_stair_of_the_cost_curve_is_taken_whole_or_left() -> None:
    """Where the fifth row costs a whole tile, either three guesses are verified or as many as the tile holds."""
    control = controller_on("1:5,2:5,3:5,4:5,5:9,6:9,7:9,8:9,10:20")
    for probability, expected in ((0.9, 7), (0.6, 3)):
        draft = Draft.chain(tuple(range(9)), "eagle3", confidences=tuple(probability**depth for depth in range(1, 10)))
        (kept,) = control.trim([context(0, Eagle3Config())], [draft])
        assert len(kept) == expected


def test_sequences_compete_for_rows() -> None:
    """In one step the likeliest guesses of all sequences are verified, not so many of each."""
    control = controller_on("1:5,8:6,16:20", num_sequences=2)
    contexts = [context(seq_id, Eagle3Config()) for seq_id in (0, 1)]
    drafts = [
        Draft.chain((1, 2, 3, 4, 5), "eagle3", confidences=(0.9, 0.85, 0.8, 0.75, 0.7)),
        Draft.chain((1, 2, 3, 4, 5), "eagle3", confidences=(0.4, 0.2, 0.1, 0.05, 0.02)),
    ]
    kept = control.trim(contexts, drafts)
    assert len(kept[0]) == 5
    assert len(kept[1]) == 1


def test_what_samplers_reject_says_nothing_of_greedy_requests() -> None:
    """Acceptance is learned apart for requests that sample, and by each sequence for itself."""
    control = controller_on(CPU)
    draft = Draft.chain((1, 2), "ngram", match_length=2)
    hot, cold = context(0, NgramConfig(), 1.0), context(1, NgramConfig())
    before = control.chances(cold, draft)
    control.chances(hot, draft)
    for _ in range(20):
        control.observe(0, draft, ())
    assert control.chances(cold, draft) == before
    assert control.chances(hot, draft)[0] < 0.3 * before[0]


def test_saved_seconds_compare_with_plain_steps() -> None:
    """Three tokens in one step of 8 ms are spared what three of 5 ms take, less 8 ms and drafting; a bad step costs."""
    control = controller_on("1:5,8:8")
    fixed = context(0, NgramConfig(num_speculative_tokens=7))
    drafts = [Draft.chain((1, 2, 3, 4, 5, 6, 7), "ngram")]
    control.note_drafting("ngram", drafts, 0.0007)
    control.trim([fixed], drafts)
    control.note_all_drafting(0.001)
    assert control.saved_seconds(3) == pytest.approx(0.006)
    assert control.saved_seconds(1) == pytest.approx(-0.004)


def test_saved_seconds_are_those_of_the_machine_as_it_is() -> None:
    """After a start on a machine five times as slow, a request's estimate is a few steps later what it should be."""
    control = controller_on("1:25,8:40")
    config = NgramConfig(num_speculative_tokens=7)
    for _ in range(5):
        control.begin(StepLoad(1))
        control.trim([context(0, config)], [Draft.chain((1, 2, 3, 4, 5, 6, 7), "ngram")])
        control.end(StepLoad(8), num_tokens=3, seconds=0.008, is_pure=True)
    control.begin(StepLoad(1))
    control.trim([context(0, config)], [Draft.chain((1, 2, 3, 4, 5, 6, 7), "ngram")])
    assert control.saved_seconds(3) == pytest.approx(0.007, rel=0.01)


def test_rows_of_long_sequences_cost_more() -> None:
    """Where a row that attends to 4,000 tokens costs as much as a step, only short sequences' guesses are verified."""
    costs = StepCostModel()
    costs.calibrate(
        (StepLoad(rows, tokens, rows * tokens), 0.005 + 1e-4 * rows + 1e-6 * rows * tokens)
        for rows in (1, 4, 16)
        for tokens in (64, 1024)
    )
    control = DraftLengthController(costs)
    for num_tokens, expected in ((8, 5), (8000, 0)):
        long = DraftContext(num_tokens, range(num_tokens), 1, SamplingParams(temperature=0.0), Eagle3Config())
        control.begin(StepLoad(1, num_tokens, num_tokens))
        draft = Draft.chain((1, 2, 3, 4, 5), "eagle3", confidences=(0.6, 0.5, 0.4, 0.3, 0.2))
        assert len(control.trim([long], [draft])[0]) == expected


def test_a_level_has_to_pay_what_it_costs() -> None:
    """Where another level takes 0.4 steps, only paths are guessed behind that make up for it; where it is free, all."""
    cheap, dear = controller_on("1:5,8:5"), controller_on("1:5,8:5")
    asking = context(0, Eagle3Config())
    for i in range(40):
        depth = 1 + i % 4
        drafts = [Draft.chain(tuple(range(depth)), "eagle3", confidences=(0.9,) * depth)]
        cheap.note_drafting("eagle3", drafts, 0.002)
        dear.note_drafting("eagle3", drafts, 0.001 + 0.002 * depth)
    assert cheap.min_reach(asking, "eagle3") == pytest.approx(0.0, abs=0.01)
    assert 0.5 < dear.min_reach(asking, "eagle3") < 1.0


def test_time_is_also_of_those_whose_prompts_are_computed() -> None:
    """One sequence guesses while a long prompt fills the step; with seven more to come, what it asks for is dear."""
    prices = []
    for num_others in (0, 7):
        control = controller_on("1:5,8:8,512:200")
        control.begin(StepLoad(1), 511, num_others)
        control.note_drafting("eagle3", [Draft.chain((1,), "eagle3", confidences=(0.9,))], 0.002)
        prices.append(-control.hope(context(0, Eagle3Config()), "eagle3"))
    assert prices[0] == pytest.approx(0.002 / 0.2 - 0.3, abs=0.01)
    assert prices[1] == pytest.approx(8 * 0.002 / 0.008 - 0.3, abs=0.05)


def test_a_finished_sequence_is_forgotten() -> None:
    """Nothing is kept of a sequence but what its class learned; one that was never seen may finish, too."""
    control = controller_on(CPU)
    for seq_id in range(50):
        control.limits([context(seq_id, NgramConfig())], "ngram")
        control.finish(seq_id)
    control.finish(1000)
    assert control.num_sequences == 0


def test_fixed_configs_are_not_weighed() -> None:
    """A config with a number is worth taking at once, whatever its draft."""
    control = DraftLengthController(StepCostModel())
    fixed = context(0, NgramConfig(num_speculative_tokens=4))
    assert control.limits([fixed], "ngram") == [4]
    assert control.appraise(fixed, "ngram", Draft.chain((1,), "ngram")) == inf
    assert control.appraise(fixed, "ngram", Draft.none("no_match", "ngram")) == 0.0


def test_all_of_an_asking_counts() -> None:
    """A quick proposer that finds nothing is asked in few steps all the same, if what is around it takes long."""
    control = controller_on(CPU)
    asking = context(0, SuffixConfig())
    num_asked = 0
    for _ in range(2000):
        control.begin(StepLoad(1))
        if not control.rests(0) and control.limits([asking], "suffix")[0]:
            num_asked += 1
            nothing = Draft.none("no_match", "suffix")
            control.appraise(asking, "suffix", nothing)
            control.note_drafting("suffix", [nothing], 1e-5)
            control.note_all_drafting(0.002)
        control.end(StepLoad(1), num_tokens=1, seconds=0.0043, is_pure=True)
    assert num_asked * 0.002 < 0.02 * 2000 * 0.0043


def test_a_sequence_whose_methods_all_rest_need_not_be_looked_at() -> None:
    """It rests while both do, and no longer than the one that wakes first."""
    control = controller_on(CPU)
    both = context(0, FirstConfig(proposers=(SuffixConfig(), Eagle3Config())))
    num_resting = 0
    for _ in range(600):
        control.begin(StepLoad(1))
        if control.rests(0):
            num_resting += 1
            assert control.limits([both], "suffix") == control.limits([both], "eagle3") == [0]
        else:
            for method, cost in (("suffix", 1e-4), ("eagle3", 1e-3)):
                if control.limits([both], method)[0]:
                    nothing = Draft.none("no_match", method)
                    control.appraise(both, method, nothing)
                    control.note_drafting(method, [nothing], cost)
        control.end(StepLoad(1), num_tokens=1, seconds=0.0043, is_pure=True)
    assert not control.rests(1)
    assert num_resting > 300
