"""The draft-length controller: how much to guess, for each sequence in each step, so that tokens come fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import TYPE_CHECKING

from draft.config import (
    MAX_SPECULATIVE_TOKENS,
    MAX_TREE_SIZE,
    MODEL_FREE_METHODS,
    DraftBounds,
    bounds_of,
    config_of,
    single_configs,
)
from draft.tree import Draft
from speculation.acceptance import HOT_TEMPERATURE, AcceptanceModel
from speculation.cost_model import DraftingCost, StepCostModel, StepLoad
from speculation.habits import FIRST_REACH, Habit, SequenceHabits

if TYPE_CHECKING:
    from draft.proposer import DraftContext

VAIN_SHARE = 0.005
"""Share of all time that may go into trying again what did not pay."""
MAX_PAUSE = 256
MOST_GUESSED = 128
"""Steps with guesses after which one goes without, to see what that takes; fewer while little is known of it."""
KNOWN = 8
"""Steps without guesses that are always worth taking; those behind them count as spent in vain."""
BEHIND = 16
"""Tokens since the last asking beyond which a proposer has to catch up first: that is no price of guessing."""
HORIZON = 64
"""Steps within which catching up has to pay."""
UNBOUNDED = DraftBounds(MAX_TREE_SIZE, MAX_SPECULATIVE_TOKENS, is_fixed=False, is_chain=False)
CLASS_WEIGHT = 6
"""Askings that a new sequence takes over from its class."""


@dataclass(slots=True)
class _Step:
    """One step's prices."""

    plain: StepLoad
    """Of its decoding sequences without guesses: one row each."""
    base: StepLoad
    """With the rows of others."""
    plain_seconds: float
    rate: float
    """What a second is worth, in tokens."""
    row_price: float
    """What one more row costs, in tokens, before it attends to anything."""
    num_asked: int = 0
    num_behind: int = 0
    """Of these, sequences for which the method asked last has to catch up."""
    proposing_seconds: float = 0.0
    """What proposers took."""
    drafting_seconds: float = 0.0
    """What all of drafting took, this controller included."""
    guess_seconds: float = 0.0
    """By how much guesses make it longer."""

    @property
    def num_sequences(self) -> int:
        return self.plain.num_rows


class DraftLengthController:
    """Maximises expected committed tokens per second, step by step.

    A guess is worth the chance that the target follows the path to it (`AcceptanceModel`). It costs what one more row
    makes the step longer (`StepCostModel`), times what a second is worth: the tokens that the running sequences make in
    one. Nodes are kept while they are worth more than they cost. A method is asked while that brings more than its
    drafting costs; else it rests, each time twice as long. What is tried again although it did not pay (a method that
    rests, a kind of guess that used to fail, a plain step where guesses pay) may take a two-hundredth of all time. Zero
    guesses is the plain step.

    Configs with explicit numbers are drafted as they stand. In one step: `begin`; for sequences that do not `rest` the
    roster calls `limits`, `min_confidence`, `min_reach`, `hope`, `appraise` and `note_drafting`, and then comes `trim`;
    `note_all_drafting`; after the forward `observe` for each sequence, and `end`. No clock: times are given.
    """

    def __init__(self, costs: StepCostModel) -> None:
        self.costs = costs
        self._acceptance = AcceptanceModel()
        self._drafting: dict[str, DraftingCost] = {}
        self._catching_up: dict[str, DraftingCost] = {}
        """The same with sequences that were not asked for long, or never."""
        self._overhead = DraftingCost()
        """What an asking costs beside the proposer."""
        self._classes: dict[tuple[str, bool], Habit] = {}
        self._sequences: dict[int, SequenceHabits] = {}
        self._speedup = 1.0
        self._num_steps = 0
        self._num_guessed = 0
        """Steps with guesses since one without."""
        self._vain_seconds = 0.0
        """What may still be spent in vain."""
        self.begin(StepLoad(1))
        self._vain_seconds = self._step.plain_seconds

    def begin(self, plain: StepLoad, num_other_rows: int = 0, num_others: int = 0) -> None:
        """A step that has, if nobody guesses, one row for each decoding sequence, and so many rows of others.

        `num_others` sequences wait, or their prompts are being computed: time spent guessing is theirs as well.
        """
        self._num_steps += 1
        base = plain.plus(num_other_rows, 0)
        seconds = self.costs.seconds(base)
        rate = self._speedup * plain.num_rows / seconds
        if num_others:
            everybody = plain.times(1 + num_others / plain.num_rows)
            rate = max(rate, self._speedup * everybody.num_rows / self.costs.seconds(everybody))
        more = self.costs.seconds(base.plus(2 * plain.num_rows, 0)) - seconds
        self._step = _Step(plain, base, self.costs.seconds(plain), rate, rate * more / (2 * plain.num_rows))

    def min_confidence(self, context: DraftContext) -> float:
        """The least chance of a path for which a node pays in this step."""
        return self._row_price(context)

    def min_reach(self, context: DraftContext, method: str) -> float:
        """The least chance of paths, together, behind which one more level of guesses pays drafting and verifying."""
        habit = self._habit(context, method)
        first, second = self._acceptance.chain_chances(method, context.sampling.temperature, 2, habit.record)
        price = self._row_price(context) + self._step.rate * self._drafting_cost(method).seconds_per_level
        return price * first / second

    def _row_price(self, context: DraftContext) -> float:
        """What one more row of the sequence costs, in tokens."""
        return self._step.row_price + self._attention_price(context)

    def _attention_price(self, context: DraftContext) -> float:
        """The part of it that grows with the sequence."""
        return self._step.rate * self.costs.attention_seconds(len(context.token_ids))

    def rests(self, seq_id: int) -> bool:
        """Whether none of the sequence's methods is to be asked in this step: it need not be looked at further."""
        sequence = self._sequences.get(seq_id)
        return sequence is not None and self._num_steps < sequence.wakes_at

    def limits(self, contexts: Sequence[DraftContext], method: str) -> list[int]:
        """Most nodes the method may draft for each; 0 where it rests because it does not pay."""
        self._step.num_behind = 0
        return [self._limit(context, method) for context in contexts]

    def hope(self, context: DraftContext, method: str) -> float:
        """What asking the method is expected to bring this sequence, in tokens, less what drafting costs."""
        habit = self._habit(context, method)
        if habit.bounds.is_fixed:
            return inf
        return 0.0 if self._num_steps < habit.wakes_at else habit.value - self._drafting_price(method)

    def appraise(self, context: DraftContext, method: str, draft: Draft) -> float:
        """What this draft is expected to bring, in tokens, less what verifying costs. Once each, empty ones too."""
        habit = self._habit(context, method)
        if habit.bounds.is_fixed:
            return inf if draft else 0.0
        chances = self._acceptance.path_chances(draft, context.sampling.temperature, habit.record)
        price = self._row_price(context)
        gains = [chance - price for chance in chances if chance > price]
        worth = sum(gains)
        habit.note(worth, 0.15)
        kind = self._class_of(context, method)
        kind.note(worth, 0.02)
        habit.appraised = draft, chances
        if draft:
            habit.has_confidences = kind.has_confidences = draft.confidences is not None
            was_kept_whole = len(gains) == len(draft) >= habit.reach
            wanted = 2 * habit.reach if was_kept_whole else max(FIRST_REACH, 2 * len(gains))
            habit.reach = min(wanted, 2 * habit.reach, habit.bounds.num_nodes)
        return worth

    def note_drafting(self, method: str, drafts: Sequence[Draft], seconds: float) -> None:
        """A proposer has drafted for several sequences in so many seconds."""
        self._step.proposing_seconds += seconds
        self._step.num_asked += len(drafts)
        depth = sum(max(draft.depths, default=0) for draft in drafts) / len(drafts)
        costs = self._catching_up if self._step.num_behind else self._drafting
        costs.setdefault(method, DraftingCost()).observe(depth, seconds / len(drafts))

    def trim(self, contexts: Sequence[DraftContext], drafts: Sequence[Draft]) -> list[Draft]:
        """The drafts cut to the nodes that pay, all sequences weighed together against the cost curve as it is.

        Where the curve has stairs, a stair is climbed as a whole or not at all.
        """
        kept: dict[int, list[int]] = {}
        ranked: list[tuple[float, int, int]] = []
        num_fixed = 0
        for i, (context, draft) in enumerate(zip(contexts, drafts, strict=True)):
            if not draft:
                continue
            if self._habit(context, draft.source).bounds.is_fixed:
                num_fixed += len(draft)
                continue
            kept[i] = []
            price = self._attention_price(context)
            ranked += [(price - chance, i, node) for node, chance in enumerate(self.chances(context, draft))]
        # A child's chance is at most its parent's, and comes behind it among equals: any prefix is a set of trees.
        ranked.sort()
        size, gain = self._best_size(ranked, num_fixed)
        if size and not num_fixed and self._measures(gain):
            return [Draft.none("measuring", draft.source) if draft else draft for draft in drafts]
        for _, i, node in ranked[:size]:
            kept[i].append(node)
        cut = list(drafts)
        for i, nodes in kept.items():
            cut[i] = self._cut(contexts[i], drafts[i], sorted(nodes))
        if ranked or num_fixed:
            self._step.guess_seconds = self._guess_seconds(contexts, cut)
        return cut

    def _measures(self, gain: float) -> bool:
        """Whether this step does without guesses worth `gain` tokens: all prices are against what it takes then."""
        step = self._step
        num_seen = self.costs.num_seen(step.num_sequences)
        if step.base != step.plain or self._num_guessed < min(8 + 2 * num_seen, MOST_GUESSED):
            return False
        return num_seen < KNOWN or self._spend_in_vain(gain / step.rate)

    def _guess_seconds(self, contexts: Sequence[DraftContext], drafts: Sequence[Draft]) -> float:
        num_attended = sum(len(draft) * len(context.token_ids) for context, draft in zip(contexts, drafts, strict=True))
        base = self._step.base
        return self.costs.seconds(base.plus(sum(map(len, drafts)), num_attended)) - self.costs.seconds(base)

    def note_all_drafting(self, seconds: float) -> None:
        """All of this step's drafting has taken so long, proposers included."""
        step = self._step
        step.drafting_seconds = seconds
        if step.num_asked:
            self._overhead.observe(0, max(seconds - step.proposing_seconds, 0.0) / step.num_asked)

    def observe(self, seq_id: int, draft: Draft, path: Sequence[int]) -> None:
        """The target has verified `draft` and followed the nodes of `path`, root first, and none behind them."""
        sequence = self._sequences.get(seq_id)
        if draft and sequence is not None and draft.source in sequence.habits:
            self._acceptance.learn(draft, path, sequence.temperature, sequence.habits[draft.source].record)

    def end(self, load: StepLoad, *, num_tokens: int, seconds: float, is_pure: bool) -> None:
        """The step with this load took `seconds`, drafting not counted, and committed `num_tokens` tokens in all.

        `is_pure`: its rows were decoding sequences' and their guesses' alone. Others say nothing about the curve.
        """
        step = self._step
        # Room for the dearest asking, or it would never be tried again.
        costs = *self._drafting.values(), *self._catching_up.values()
        dearest = max((cost.seconds for cost in costs), default=0.0) + self._overhead.seconds
        most = 2 * max(step.plain_seconds / step.num_sequences, dearest)
        self._vain_seconds = min(self._vain_seconds + VAIN_SHARE * seconds, most)
        if is_pure:
            self._num_guessed = self._num_guessed + 1 if load.num_rows > step.num_sequences else 0
            self.costs.observe(load, seconds)
            # By what it should have taken: a hiccup says nothing about guessing.
            taken = self.costs.seconds(load) + step.drafting_seconds
            gain = num_tokens / step.num_sequences * step.plain_seconds / taken
            self._speedup = max(self._speedup + 0.05 * (min(gain, 16.0) - self._speedup), 1.0)

    def saved_seconds(self, num_tokens: int) -> float:
        """What a sequence that got `num_tokens` from this step was spared against one plain step a token.

        By what steps cost now, not by how long this one took: a hiccup would have met plain decoding as well.
        """
        step = self._step
        return (num_tokens - 1) * step.plain_seconds - step.guess_seconds - step.drafting_seconds

    @property
    def num_sequences(self) -> int:
        """Sequences of which something is kept."""
        return len(self._sequences)

    def finish(self, seq_id: int) -> None:
        """The sequence has ended; what its class learned stays."""
        self._sequences.pop(seq_id, None)

    def _limit(self, context: DraftContext, method: str) -> int:
        habit = self._habit(context, method)
        if habit.bounds.is_fixed:
            return habit.bounds.num_nodes
        if self._num_steps < habit.wakes_at:
            return 0
        is_behind = len(context.token_ids) > habit.num_known + BEHIND
        if self._pays(method, habit, is_behind=is_behind):
            habit.pause = 0
        elif not self._try_in_vain(context, method, habit, is_behind=is_behind):
            return 0
        habit.num_known = len(context.token_ids)
        self._step.num_behind += is_behind
        return min(self._reach(context, method, habit), habit.bounds.num_nodes)

    def _pays(self, method: str, habit: Habit, *, is_behind: bool) -> bool:
        gain = habit.value - self._drafting_price(method)
        return HORIZON * gain > (self._step.rate * self._asking_seconds(method, is_behind=True) if is_behind else 0.0)

    def _try_in_vain(self, context: DraftContext, method: str, habit: Habit, *, is_behind: bool) -> bool:
        """Whether a method that does not pay is asked again now; it rests afterwards.

        One that has to catch up is asked in the next step, too: what guessing costs is seen then.
        """
        is_asked = self._spend_in_vain(self._asking_seconds(method, is_behind=is_behind))
        if not (is_asked and is_behind):
            habit.pause = min(max(2 * habit.pause, 1), self._longest_pause(method))
            self._sequences[context.seq_id].lay_down(habit, self._num_steps + 1 + habit.pause)
        return is_asked

    def _reach(self, context: DraftContext, method: str, habit: Habit) -> int:
        """How many nodes to ask for. A proposer without confidences cannot know where to stop, so we tell it."""
        if habit.has_confidences or method in MODEL_FREE_METHODS:
            return habit.reach
        price = self._row_price(context) + self._step.rate * self._drafting_cost(method).seconds_per_level
        chances = self._acceptance.chain_chances(method, context.sampling.temperature, habit.reach, habit.record)
        return max(sum(chance > price for chance in chances), 1)

    def chances(self, context: DraftContext, draft: Draft) -> list[float]:
        """[n] for each node of the draft the chance that the target follows the path to it."""
        habit = self._habit(context, draft.source)
        if habit.appraised is not None and habit.appraised[0] is draft:
            return habit.appraised[1]
        return self._acceptance.path_chances(draft, context.sampling.temperature, habit.record)

    def _best_size(self, ranked: list[tuple[float, int, int]], num_fixed: int) -> tuple[int, float]:
        """How many of the ranked nodes to verify, and the gain in tokens less tokens' worth of time: the largest."""
        base = self._step.base.num_rows + num_fixed
        base_seconds = self.costs.rows_seconds(base)
        best_gain = gained = 0.0
        best = 0
        for size, (negated, _, _) in enumerate(ranked, start=1):
            gained -= negated
            gain = gained - self._step.rate * (self.costs.rows_seconds(base + size) - base_seconds)
            if gain > best_gain:
                best, best_gain = size, gain
        return best, best_gain

    def _cut(self, context: DraftContext, draft: Draft, nodes: list[int]) -> Draft:
        if nodes:
            return draft.keep(nodes)
        wants_trial = self._acceptance.wants_trial(draft, context.sampling.temperature)
        if wants_trial and self._spend_in_vain(self._row_price(context) / self._step.rate):
            return draft.keep([0])
        return Draft.none("does_not_pay", draft.source)

    def _spend_in_vain(self, seconds: float) -> bool:
        if seconds > self._vain_seconds:
            return False
        self._vain_seconds -= seconds
        return True

    def _longest_pause(self, method: str) -> int:
        """Steps of rest with which asking in vain takes its share of time, if every sequence did."""
        cost = self._asking_seconds(method) * self._step.num_sequences / self._step.plain_seconds
        return max(min(ceil(cost / VAIN_SHARE), MAX_PAUSE), 1)

    def _drafting_price(self, method: str) -> float:
        """What asking costs, in tokens."""
        return self._step.rate * self._asking_seconds(method)

    def _asking_seconds(self, method: str, *, is_behind: bool = False) -> float:
        cost = self._catching_up.get(method) if is_behind else None
        return (cost or self._drafting_cost(method)).seconds + self._overhead.seconds

    def _drafting_cost(self, method: str) -> DraftingCost:
        if method not in self._drafting:
            self._drafting[method] = DraftingCost()
        return self._drafting[method]

    def _habit(self, context: DraftContext, method: str) -> Habit:
        """What is known of a method that the sequence's config names."""
        sequence = self._sequences.get(context.seq_id)
        if sequence is None:
            num_methods = len(single_configs(context.config))
            sequence = self._sequences[context.seq_id] = SequenceHabits(context.sampling.temperature, num_methods)
        habit = sequence.habits.get(method)
        if habit is None:
            bounds, kind = bounds_of(config_of(context.config, method)), self._class_of(context, method)
            habit = Habit(bounds, kind.value, min(kind.num_asked, CLASS_WEIGHT), has_confidences=kind.has_confidences)
            sequence.habits[method] = habit
        return habit

    def _class_of(self, context: DraftContext, method: str) -> Habit:
        """What all sequences of this method, sampling or not, have in common."""
        key = method, context.sampling.temperature >= HOT_TEMPERATURE
        if key not in self._classes:
            self._classes[key] = Habit(UNBOUNDED)
        return self._classes[key]
