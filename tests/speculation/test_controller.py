"""The draft-length controller, in an engine without a model: a target that counts, and proposers that are scripted."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

import pytest

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
from speculation.recording import Recording
from speculation.simulate import Replay, Simulator, parse_curve

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
