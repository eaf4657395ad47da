"""The draft-length controller, in an engine without a model: a target that counts, and proposers that are scripted."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft.config import (
    Eagle3Config,
    FirstConfig,
    MedusaConfig,
    NgramConfig,
    NoSpeculation,
    SpeculationConfig,
    SuffixConfig,
)
from draft.proposer import DraftContext, Features
from draft.tree import Draft
from speculation.controller import DraftLengthController
from speculation.cost_model import StepCostModel, StepLoad
from speculation.recording import Recording
from speculation.simulate import Replay, Simulator, parse_curve
from target.sampling_params import SamplingParams

CPU = "1:4.3,3:6,5:8,8:12,16:21"
"""Milliseconds by rows where a row more costs a fifth of the first."""
FLAT = "1:5,64:6,512:12"
STEEP = "1:1,64:64"

Hit = Callable[[int], bool]
"""Whether the guess of this token is right."""


class Scripted:
    """Drafts chains of the next integers, those for which `hit` is false spoilt; each call takes `cost` seconds."""

    needs_features: tuple[int, ...] = ()

    def __init__(
        self, name: str, hit: Hit, cost: float = 0.0, confidence: Callable[[int], float] | None = None
    ) -> None:
        self.name = name
        self.hit = hit
        self.cost = cost
        self.confidence = confidence
        self.now = 0.0
        self.num_asked = 0

    def start(
        self, seq_id: int, prompt_token_ids: Sequence[int], *, cache_salt: str = "", prediction: Sequence[int] = ()
    ) -> None: ...

    def propose(self, contexts: Sequence[DraftContext], limits: Sequence[int]) -> list[Draft]:
        self.now += self.cost * len(contexts)
        self.num_asked += len(contexts)
        return [self.draft(context.token_ids[-1] + 1, limit) for context, limit in zip(contexts, limits, strict=True)]

    def draft(self, first: int, limit: int) -> Draft:
        tokens = range(first, first + limit)
        guesses = tuple(token if self.hit(token) else -token for token in tokens)
        if self.confidence is None:
            return Draft.chain(guesses, self.name, match_length=3)
        confidences, path = [], 1.0
        for token in tokens:
            path *= self.confidence(token)
            confidences.append(path)
        return Draft.chain(guesses, self.name, confidences=tuple(confidences))

    def commit(self, seq_id: int, token_ids: Sequence[int], features: Features | None) -> None: ...

    def finish(self, seq_id: int) -> None: ...


def count(
    *proposers: Scripted,
    config: SpeculationConfig | None = None,
    curve: str = CPU,
    num_tokens: int = 1000,
    num_sequences: int = 1,
    num_concurrent: int = 1,
) -> tuple[Replay, float]:
    """Let sequences count to `num_tokens` with these proposers; also returns the speed-up over plain decoding."""
    recordings = [Recording(prompt_token_ids=[0], output_token_ids=list(range(1, num_tokens + 1)))] * num_sequences
    replays = [
        Simulator(
            parse_curve(curve),
            {proposer.name: proposer for proposer in proposers},
            num_concurrent=num_concurrent,
            clock=lambda: sum(proposer.now for proposer in proposers),
        ).run(recordings, chosen)
        for chosen in (NoSpeculation(), config or NgramConfig())
    ]
    return replays[1], replays[0].seconds / replays[1].seconds


def coin(probability: float, seed: int = 0) -> Hit:
    rng = random.Random(seed)
    return lambda token: rng.random() < probability


def never(token: int) -> bool:
    return False


def always(token: int) -> bool:
    return True


@pytest.mark.parametrize("curve", [CPU, FLAT, STEEP])
@pytest.mark.parametrize("cost", [0.0, 5e-5, 2e-3])
def test_a_liar_costs_next_to_nothing(curve: str, cost: float) -> None:
    """A proposer that is always wrong is found out: at most three hundredths of the time, whatever it costs to ask."""
    replay, speedup = count(Scripted("ngram", never, cost), curve=curve)
    assert speedup >= 0.97
    assert replay.num_accepted == 0


def test_a_liar_drafts_in_few_steps() -> None:
    """Where rows cost something, wrong guesses are verified in three steps of a hundred at most."""
    replay, _ = count(Scripted("ngram", never, 5e-5))
    assert replay.num_drafts <= 0.03 * replay.num_steps
    assert replay.skipped["does_not_pay"] >= 0.9 * replay.num_steps


def test_a_liar_is_known_to_the_next_sequence() -> None:
    """Short sequences one after the other do not each pay for finding out, neither do many at once."""
    for num_concurrent in (1, 32):
        _, speedup = count(
            Scripted("ngram", never, 5e-5), num_tokens=128, num_sequences=40, num_concurrent=num_concurrent
        )
        assert speedup >= 0.97


@pytest.mark.parametrize("curve", [CPU, FLAT])
def test_an_oracle_reaches_the_largest_draft(curve: str) -> None:
    """A proposer that is always right drafts 32 tokens a step before long."""
    replay, speedup = count(Scripted("ngram", always), curve=curve)
    assert replay.drafted_per_position[32] >= 0.8 * replay.num_drafts
    assert speedup > (3 if curve == CPU else 20)


def test_where_rows_cost_as_much_as_steps_nothing_is_drafted() -> None:
    """Even right guesses do not pay on a machine whose steps take as long as their rows, and trying costs little."""
    replay, speedup = count(Scripted("ngram", always), curve=STEEP)
    assert replay.num_drafts <= 0.03 * replay.num_steps
    assert speedup >= 0.97


def test_flat_curves_get_long_drafts_and_steep_ones_short() -> None:
    """The same proposer, right two times in three: the dearer a row, the shorter the drafts."""
    lengths = []
    for curve in (FLAT, CPU, "1:4,2:6,4:10,64:130"):
        replay, _ = count(Scripted("ngram", coin(0.67)), curve=curve)
        lengths.append(replay.num_draft_tokens / replay.num_steps)
    assert lengths[0] > 2 * lengths[1] > 4 * lengths[2]


@pytest.mark.parametrize("probability", [0.5, 0.8])
def test_no_fixed_length_is_much_better(probability: float) -> None:
    """For guesses of steady quality the controller finds a length within a tenth of the best fixed one."""
    _, adaptive = count(Scripted("ngram", coin(probability)), num_tokens=3000)
    fixed = [
        count(Scripted("ngram", coin(probability)), config=NgramConfig(num_speculative_tokens=k), num_tokens=3000)[1]
        for k in (1, 2, 3, 4, 6, 8)
    ]
    assert adaptive >= 0.9 * max(fixed)


def test_it_follows_when_guesses_turn_bad_and_good_again() -> None:
    """Stretches in which everything is right and in which nothing is: long drafts in the first, none in the second."""
    replay, speedup = count(Scripted("ngram", lambda token: token // 200 % 2 == 0), num_tokens=4000)
    assert speedup > 1.3
    _, fixed = count(
        Scripted("ngram", lambda token: token // 200 % 2 == 0),
        num_tokens=4000,
        config=NgramConfig(num_speculative_tokens=8),
    )
    assert speedup > 1.1 * fixed
    assert replay.num_draft_tokens < 2 * replay.num_accepted


def test_confidences_are_believed_as_far_as_they_proved_true() -> None:
    """A drafter that knows when it is right is cut where it is not sure; one that boasts is found out."""
    right = coin(0.5, seed=1)
    known = {token: right(token) for token in range(5000)}
    honest = Scripted("eagle3", known.__getitem__, confidence=lambda token: 0.95 if known[token] else 0.05)
    replay, honest_speedup = count(honest, config=Eagle3Config())
    assert replay.acceptance_rate > 0.85
    boasting = Scripted("eagle3", coin(0.15, seed=2), confidence=lambda token: 0.95)
    replay, boasting_speedup = count(boasting, config=Eagle3Config())
    assert honest_speedup > 1.3
    assert boasting_speedup >= 0.97
    assert replay.num_draft_tokens <= 0.2 * replay.num_steps


def test_a_drafter_that_costs_more_than_it_brings_rests() -> None:
    """The same guesses pay at a tenth of a millisecond a draft and not at ten: then it is asked ever more rarely."""
    cheap = Scripted("medusa", coin(0.6), cost=1e-4)
    dear = Scripted("medusa", coin(0.6), cost=1e-2)
    _, cheap_speedup = count(cheap, config=MedusaConfig())
    _, dear_speedup = count(dear, config=MedusaConfig())
    assert cheap_speedup > 1.2
    assert dear_speedup >= 0.97
    assert dear.num_asked <= 0.02 * 1000


def test_a_drafter_that_costs_many_steps_is_tried_again() -> None:
    """A drafter whose asking takes as long as ten steps, in vain, is not given up for good, nor is it asked often."""
    dear = Scripted("medusa", never, cost=0.043, confidence=lambda token: 0.9)
    _, speedup = count(dear, config=MedusaConfig(), num_tokens=10_000)
    assert 3 <= dear.num_asked <= 12
    assert speedup >= 0.97


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


@pytest.mark.parametrize("num_concurrent", [2, 8])
def test_it_finds_out_that_rows_cost_more_than_it_thought(num_concurrent: int) -> None:
    """Started with a curve that is flat where the machine's is steep, it guesses what does not pay for 300 tokens."""
    recordings = [Recording(prompt_token_ids=[0], output_token_ids=list(range(1, 301)))] * num_concurrent
    seconds = []
    for config in (NoSpeculation(), MedusaConfig()):
        simulator = Simulator(
            parse_curve(CPU),
            {"medusa": Scripted("medusa", coin(0.3), confidence=lambda token: 0.3)},
            num_concurrent=num_concurrent,
            known=parse_curve("1:20,64:21"),
            clock=lambda: 0.0,
        )
        seconds.append([simulator.run(recordings, config).seconds for _ in range(2)])
    assert seconds[1][0] > 1.1 * seconds[0][0]
    assert seconds[1][1] < 1.03 * seconds[0][1]


def test_some_steps_go_without_guesses_to_see_what_they_cost() -> None:
    """Where every step has guesses, one in ten at first and one in a hundred later has none, and says why."""
    first, _ = count(Scripted("ngram", always), num_tokens=500, curve=FLAT)
    later, _ = count(Scripted("ngram", coin(0.9)), num_tokens=20_000, curve=FLAT)
    assert 0 < first.skipped["measuring"] <= first.num_steps / 8
    assert 0 < later.skipped["measuring"] <= later.num_steps / 50


class Late(Scripted):
    """Takes 30 ms more for a sequence that it was not asked about for a while."""

    num_known = 0

    def propose(self, contexts: Sequence[DraftContext], limits: Sequence[int]) -> list[Draft]:
        num_tokens = len(contexts[0].token_ids)
        self.now += 0.0 if 0 <= num_tokens - self.num_known <= 16 else 0.03
        self.num_known = num_tokens
        return super().propose(contexts, limits)

    def finish(self, seq_id: int) -> None:
        self.num_known = 0


def test_catching_up_is_no_price_of_guessing() -> None:
    """Who needs long to catch up and little from then on is asked in every step, if the guesses are right.

    If they are wrong, that may still take no more than its share.
    """
    recordings = [Recording(prompt_token_ids=list(range(30)), output_token_ids=list(range(30, 158)))] * 40
    for hit, least, most, speed in ((coin(0.6), 0.9, 1.0, 1.2), (never, 0.0, 0.02, 0.97)):
        late = Late("ngram", hit, 5e-5)
        simulator = Simulator(parse_curve(CPU), {"ngram": late}, clock=partial(getattr, late, "now"))
        plain, replay = (simulator.run(recordings, config) for config in (NoSpeculation(), NgramConfig()))
        assert least * replay.num_steps <= replay.num_drafts <= most * replay.num_steps
        assert plain.seconds / replay.seconds >= speed


def test_explicit_numbers_are_drafted_as_given() -> None:
    """A config with a number gets exactly that, good or bad, trees as well; "auto" with a tree size stays below it."""
    for hit in (always, never):
        replay, _ = count(Scripted("ngram", hit), config=NgramConfig(num_speculative_tokens=5), num_tokens=100)
        assert replay.drafted_per_position[5] >= replay.num_drafts - 4
        assert replay.drafted_per_position[6] == 0
        assert replay.skipped["does_not_pay"] == 0
    replay, _ = count(Scripted("suffix", always), config=SuffixConfig(tree_size=3))
    assert max(replay.drafted_per_position) == 3


def test_the_head_drafts_where_lookup_is_poor() -> None:
    """In a `first` config a lookup that is seldom right gives way to a better head, a good lookup does not."""
    config = FirstConfig(proposers=(NgramConfig(), MedusaConfig()))
    poor, head = Scripted("ngram", coin(0.1)), Scripted("medusa", coin(0.7), cost=2e-4)
    _, speedup = count(poor, head, config=config)
    assert head.num_asked > 400
    assert speedup > 1.3
    good, idle = Scripted("ngram", coin(0.95)), Scripted("medusa", coin(0.3), cost=2e-4)
    count(good, idle, config=config)
    assert idle.num_asked < 20


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
