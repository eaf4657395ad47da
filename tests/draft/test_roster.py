"""The roster: every config of every sequence through one door."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import pytest
import torch

from draft.config import (
    AutoConfig,
    DraftModelConfig,
    Eagle3Config,
    FirstConfig,
    MedusaConfig,
    NgramConfig,
    NoSpeculation,
    SpeculationConfig,
    SuffixConfig,
    method_of,
)
from draft.proposer import DraftContext, Features
from draft.roster import AsConfigured, Roster
from draft.tree import Draft
from target.sampling_params import SamplingParams


class Fake:
    """A proposer that drafts `answer`, or nothing where it is 0, and writes down what it is told."""

    def __init__(self, name: str, answer: int = 0, layers: tuple[int, ...] = ()) -> None:
        self.name = name
        self.answer = answer
        self.needs_features = layers
        self.calls: list[list[int]] = []
        self.limits: list[int] = []
        self.told: list[object] = []

    def start(
        self, seq_id: int, prompt_token_ids: Sequence[int], *, cache_salt: str = "", prediction: Sequence[int] = ()
    ) -> None:
        self.told.append(("start", seq_id, cache_salt, tuple(prediction)))

    def propose(self, contexts: Sequence[DraftContext], limits: Sequence[int]) -> list[Draft]:
        assert all(method_of(context.config) == self.name for context in contexts)
        self.calls.append([context.seq_id for context in contexts])
        self.limits += limits
        if not self.answer:
            return [Draft.none("no_match", self.name) for _ in contexts]
        return [Draft.chain((self.answer,), self.name) for _ in contexts]

    def commit(self, seq_id: int, token_ids: Sequence[int], features: Features | None) -> None:
        states = None if features is None else features.states.tolist()
        self.told.append(("commit", seq_id, tuple(token_ids), states))

    def finish(self, seq_id: int) -> None:
        self.told.append(("finish", seq_id))


class Scripted(AsConfigured):
    """Control by tables: what each method may draft, is hoped to bring, and its drafts are worth."""

    def __init__(self, limits: dict[str, int], hopes: dict[str, float], worths: dict[str, float]) -> None:
        super().__init__()
        self.tables = limits, hopes, worths

    def min_confidence(self, context: DraftContext) -> float:
        return 0.25

    def limits(self, contexts: Sequence[DraftContext], method: str) -> list[int]:
        return [self.tables[0].get(method, 9) for _ in contexts]

    def hope(self, context: DraftContext, method: str) -> float:
        return self.tables[1].get(method, 0.0)

    def appraise(self, context: DraftContext, method: str, draft: Draft) -> float:
        return self.tables[2].get(method, 0.0) if draft else 0.0


BOTH = FirstConfig(proposers=(SuffixConfig(), Eagle3Config()))


def ask(
    roster: Roster, configs: Sequence[SpeculationConfig], control: AsConfigured | None = None, most: int = 63
) -> list[Draft]:
    """Start one sequence a config, and let all be drafted for."""
    contexts = []
    for seq_id, config in enumerate(configs):
        roster.start(seq_id, config, [1, 2])
        contexts.append(DraftContext(seq_id, [1, 2], 2, SamplingParams(), config))
    return roster.propose(contexts, [most] * len(contexts), control or AsConfigured())


def test_the_first_that_has_something_drafts() -> None:
    """A method without a match gives way to the next; one with a match ends the search; else the reason stays."""
    nothing, head = Fake("suffix"), Fake("eagle3", 7)
    assert ask(Roster({"suffix": nothing, "eagle3": head}), [BOTH])[0].source == "eagle3"
    match, idle = Fake("suffix", 5), Fake("eagle3", 7)
    assert ask(Roster({"suffix": match, "eagle3": idle}), [BOTH])[0].token_ids == (5,)
    assert idle.calls == []
    silent = Roster({"suffix": Fake("suffix"), "eagle3": Fake("eagle3")})
    assert ask(silent, [BOTH])[0].skipped == "no_match"


def test_all_sequences_of_a_step_reach_a_model_together() -> None:
    """However they came to it, sequences that want the same model are drafted in one call, after all lookups."""
    suffix, ngram, eagle = Fake("suffix"), Fake("ngram", 3), Fake("eagle3", 7)
    roster = Roster({"suffix": suffix, "ngram": ngram, "eagle3": eagle})
    configs: list[SpeculationConfig] = [
        Eagle3Config(),
        BOTH,
        NgramConfig(),
        FirstConfig(proposers=(SuffixConfig(), NgramConfig())),
        NoSpeculation(),
    ]
    drafts = ask(roster, configs)
    assert [draft.source for draft in drafts] == ["eagle3", "eagle3", "ngram", "ngram", ""]
    assert drafts[4].skipped == "disabled"
    assert eagle.calls == [[0, 1]]
    assert suffix.calls == [[1, 3]]


def test_a_draft_gives_way_where_more_is_hoped_for() -> None:
    """A poor match does not stop a better head from drafting; of two drafts the more valuable one is kept."""
    proposers = {"suffix": Fake("suffix", 5), "eagle3": Fake("eagle3", 7)}
    hopes = {"eagle3": 0.5}
    worse_head = Scripted({}, hopes, {"suffix": 0.3, "eagle3": 0.1})
    assert ask(Roster(proposers), [BOTH], worse_head)[0].source == "suffix"
    better_head = Scripted({}, hopes, {"suffix": 0.3, "eagle3": 0.9})
    assert ask(Roster(proposers), [BOTH], better_head)[0].source == "eagle3"
    good_match = Scripted({}, hopes, {"suffix": 0.6, "eagle3": 0.9})
    assert ask(Roster(proposers), [BOTH], good_match)[0].source == "suffix"
    chosen_size = Scripted({}, {"eagle3": inf}, {"suffix": inf})
    assert ask(Roster(proposers), [BOTH], chosen_size)[0].source == "suffix"


def test_limits_are_the_smaller_of_the_engines_and_the_controls() -> None:
    """A method limited to 0 is not asked at all, which is said; others get the smaller limit."""
    suffix, eagle = Fake("suffix", 5), Fake("eagle3", 7)
    roster = Roster({"suffix": suffix, "eagle3": eagle})
    (draft,) = ask(roster, [BOTH], Scripted({"suffix": 0, "eagle3": 0}, {}, {}), most=4)
    assert draft.skipped == "does_not_pay"
    assert suffix.calls == eagle.calls == []
    roster.finish(0)
    ask(roster, [SuffixConfig(), Eagle3Config()], Scripted({"suffix": 3}, {}, {}), most=4)
    assert (suffix.limits, eagle.limits) == ([3], [4])


def test_as_configured_takes_numbers_as_given() -> None:
    """Without a controller an explicit number is the limit, and "auto" a constant."""
    suffix, ngram = Fake("suffix", 5), Fake("ngram", 5)
    configs: list[SpeculationConfig] = [
        SuffixConfig(num_speculative_tokens=3),
        SuffixConfig(),
        NgramConfig(num_speculative_tokens=20),
    ]
    ask(Roster({"suffix": suffix, "ngram": ngram}), configs, AsConfigured(auto=6))
    assert (suffix.limits, ngram.limits) == ([3, 6], [20])


def test_each_proposer_hears_of_its_own_sequences_and_gets_its_own_features() -> None:
    """A sequence's verbs reach the methods of its config alone; features are cut to the layers each one asked for."""
    suffix, eagle, medusa = Fake("suffix"), Fake("eagle3", 7, (4, 2)), Fake("medusa", 7, (-1,))
    roster = Roster({"suffix": suffix, "eagle3": eagle, "medusa": medusa})
    config = FirstConfig(proposers=(SuffixConfig(), Eagle3Config(), MedusaConfig()))
    assert roster.feature_layers(config) == (-1, 2, 4)
    roster.start(5, config, [1], cache_salt="a", prediction=[9])
    roster.start(6, SuffixConfig(), [1])
    states = torch.tensor([[0.0, 1.0, 20.0, 21.0, 40.0, 41.0]])
    roster.commit(5, [], Features(3, states))
    roster.commit(5, [8], None)
    roster.finish(5)
    assert suffix.told[0] == ("start", 5, "a", (9,))
    assert suffix.told[2:] == [("commit", 5, (8,), None), ("finish", 5)]
    assert eagle.told[1] == ("commit", 5, (), [[40.0, 41.0, 20.0, 21.0]])
    assert medusa.told[1] == ("commit", 5, (), [[0.0, 1.0]])


def test_verbs_out_of_order_and_unknown_methods_raise() -> None:
    """A second start, a sequence that is not here, a method that is not served and "auto" unresolved are refused."""
    roster = Roster({"suffix": Fake("suffix")})
    roster.start(0, SuffixConfig(), [1])
    with pytest.raises(ValueError, match="sequence 0 was started already"):
        roster.start(0, SuffixConfig(), [1])
    with pytest.raises(ValueError, match="sequence 1 was never started"):
        roster.commit(1, [1], None)
    with pytest.raises(ValueError, match="sequence 1 was never started"):
        roster.finish(1)
    with pytest.raises(ValueError, match="sequence 1 was never started"):
        roster.propose([DraftContext(1, [1], 1, SamplingParams(), SuffixConfig())], [4], AsConfigured())
    with pytest.raises(ValueError, match="'draft_model' is not served here; one of suffix"):
        roster.start(1, FirstConfig(proposers=(SuffixConfig(), DraftModelConfig())), [1])
    with pytest.raises(ValueError, match="must be resolved"):
        roster.start(1, AutoConfig(), [1])
