"""The proposers a service has, and who drafts for which sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from time import perf_counter
from typing import Protocol

import torch

from draft.config import (
    MODEL_FREE_METHODS,
    SingleConfig,
    SpeculationConfig,
    bounds_of,
    config_of,
    method_of,
    single_configs,
)
from draft.proposer import DraftContext, Features, Proposer
from draft.tree import Draft


class DraftControl(Protocol):
    """Who decides how much is drafted, and whether a draft is good enough not to ask the next proposer.

    Contexts are the sequences' own, with their whole config; `method` is one that it names.
    """

    def limits(self, contexts: Sequence[DraftContext], method: str) -> list[int]:
        """Most nodes the method may draft for each; 0 skips it: it does not pay."""

    def min_confidence(self, context: DraftContext) -> float:
        """The least chance of a path for which verifying one more node pays; 0 takes everything."""

    def min_reach(self, context: DraftContext, method: str) -> float:
        """The least chance of paths, together, behind which drafting one more level pays; 0 goes on to the end."""

    def hope(self, context: DraftContext, method: str) -> float:
        """What asking the method is expected to bring, in tokens a step, less what drafting costs."""

    def appraise(self, context: DraftContext, method: str, draft: Draft) -> float:
        """What the method's draft is expected to bring, in tokens a step, less what verifying it costs."""

    def note_drafting(self, method: str, drafts: Sequence[Draft], seconds: float) -> None:
        """One proposer has drafted for several sequences in so many seconds."""


class AsConfigured:
    """Control without a controller: every proposer drafts as much as its config allows, the first draft is taken.

    Where the config says "auto" that is `auto` nodes.
    """

    def __init__(self, auto: int = 8) -> None:
        self._auto = auto

    def limits(self, contexts: Sequence[DraftContext], method: str) -> list[int]:
        all_bounds = [bounds_of(config_of(context.config, method)) for context in contexts]
        return [bounds.num_nodes if bounds.is_fixed else min(bounds.num_nodes, self._auto) for bounds in all_bounds]

    def min_confidence(self, context: DraftContext) -> float:
        return 0.0

    def min_reach(self, context: DraftContext, method: str) -> float:
        return 0.0

    def hope(self, context: DraftContext, method: str) -> float:
        return 0.0

    def appraise(self, context: DraftContext, method: str, draft: Draft) -> float:
        return inf if draft else 0.0

    def note_drafting(self, method: str, drafts: Sequence[Draft], seconds: float) -> None:
        pass


@dataclass(slots=True)
class _Turn:
    """One sequence while it is being drafted for: which methods are still to be asked, and the best draft so far."""

    context: DraftContext
    most: int
    methods: list[str]
    best: Draft
    value: float = 0.0


class Roster:
    """All proposers behind one door: any resolved config of any sequence, a single method or `first`.

    The methods of a `first` config are asked in order until one drafts something that is worth more than what the rest
    is expected to bring. Sequences that wait for the same method are asked together: lookups first, which cost little,
    then each model once, for all that came to it.
    """

    def __init__(self, proposers: Mapping[str, Proposer], *, clock: Callable[[], float] = perf_counter) -> None:
        """`proposers` by method."""
        self._proposers = dict(proposers)
        self._clock = clock
        self._methods: dict[int, tuple[str, ...]] = {}
        self._layers: dict[int, tuple[int, ...]] = {}
        """Of each sequence the layers of whose hidden states its proposers learn."""

    @property
    def methods(self) -> frozenset[str]:
        """Methods it can serve."""
        return frozenset(self._proposers)

    @property
    def all_feature_layers(self) -> tuple[int, ...]:
        """Layers of whose hidden states any proposer learns, ascending."""
        return tuple(sorted({layer for proposer in self._proposers.values() for layer in proposer.needs_features}))

    def feature_layers(self, config: SpeculationConfig) -> tuple[int, ...]:
        """Layers of whose hidden states some proposer of this config learns, ascending."""
        wanted = {layer for single in single_configs(config) for layer in self._of(single).needs_features}
        return tuple(sorted(wanted))

    def start(
        self,
        seq_id: int,
        config: SpeculationConfig,
        token_ids: Sequence[int],
        *,
        cache_salt: str = "",
        prediction: Sequence[int] = (),
    ) -> None:
        """A sequence begins, with the proposers its config names. Raises ValueError if it has, or one is not here."""
        if seq_id in self._methods:
            raise ValueError(f"sequence {seq_id} was started already")
        singles = single_configs(config)
        for proposer in [self._of(single) for single in singles]:
            proposer.start(seq_id, token_ids, cache_salt=cache_salt, prediction=prediction)
        self._methods[seq_id] = tuple(method_of(single) for single in singles)
        self._layers[seq_id] = self.feature_layers(config)

    def propose(self, contexts: Sequence[DraftContext], most: Sequence[int], control: DraftControl) -> list[Draft]:
        """One draft a context, in order, of at most `most[i]` (> 0) nodes; empty drafts say why."""
        turns = [
            _Turn(context, limit, list(self._methods_of(context.seq_id)), Draft.none("disabled"))
            for context, limit in zip(contexts, most, strict=True)
        ]
        while waiting := [turn for turn in turns if turn.methods]:
            method = min((turn.methods[0] for turn in waiting), key=lambda name: name not in MODEL_FREE_METHODS)
            self._ask(method, [turn for turn in waiting if turn.methods[0] == method], control)
        return [turn.best for turn in turns]

    def _ask(self, method: str, turns: Sequence[_Turn], control: DraftControl) -> None:
        """One method drafts for all that wait for it, but those for which it does not pay."""
        asked: list[_Turn] = []
        contexts: list[DraftContext] = []
        limits: list[int] = []
        for turn, limit in zip(turns, control.limits([turn.context for turn in turns], method), strict=True):
            if limit > 0:
                asked.append(turn)
                contexts.append(_asking(turn.context, method, control))
                limits.append(min(limit, turn.most))
            else:
                self._settle(turn, Draft.none("does_not_pay", method), 0.0, control)
        if not asked:
            return
        started = self._clock()
        drafts = self._proposers[method].propose(contexts, limits)
        control.note_drafting(method, drafts, self._clock() - started)
        for turn, draft in zip(asked, drafts, strict=True):
            self._settle(turn, draft, control.appraise(turn.context, method, draft), control)

    @staticmethod
    def _settle(turn: _Turn, draft: Draft, value: float, control: DraftControl) -> None:
        """Keep the better draft, and go on to the next method only where that may do better still."""
        is_first = turn.best.skipped == "disabled"
        if is_first or value > turn.value or (draft and not turn.best):
            turn.best, turn.value = draft, value
        del turn.methods[0]
        if draft and value >= max((control.hope(turn.context, method) for method in turn.methods), default=0.0):
            turn.methods.clear()

    def commit(self, seq_id: int, token_ids: Sequence[int], features: Features | None) -> None:
        """Tokens were appended. `features` has the columns of `feature_layers` of the sequence's config, in order."""
        names = self._methods_of(seq_id)
        if features is None:
            for name in names:
                self._proposers[name].commit(seq_id, token_ids, None)
            return
        layers = self._layers[seq_id]
        for name in names:
            needed = self._proposers[name].needs_features
            if needed or token_ids:
                mine = _columns(features, layers, needed) if needed else None
                self._proposers[name].commit(seq_id, token_ids, mine)

    def finish(self, seq_id: int) -> None:
        """The sequence has ended. Raises ValueError for one that was not started."""
        for name in self._methods_of(seq_id):
            self._proposers[name].finish(seq_id)
        del self._methods[seq_id], self._layers[seq_id]

    def _of(self, single: SingleConfig) -> Proposer:
        proposer = self._proposers.get(method_of(single))
        if proposer is None:
            served = ", ".join(sorted(self._proposers))
            raise ValueError(f"method {method_of(single)!r} is not served here; one of {served}")
        return proposer

    def _methods_of(self, seq_id: int) -> tuple[str, ...]:
        if seq_id not in self._methods:
            raise ValueError(f"sequence {seq_id} was never started, or has finished")
        return self._methods[seq_id]


def _asking(context: DraftContext, method: str, control: DraftControl) -> DraftContext:
    """The context as one of its config's proposers sees it. A size that the user chose is drafted to its end."""
    config = config_of(context.config, method)
    is_fixed = bounds_of(config).is_fixed
    goes_on = is_fixed or method in MODEL_FREE_METHODS
    return DraftContext(
        context.seq_id,
        context.token_ids,
        context.num_prompt_tokens,
        context.sampling,
        config,
        context.cache_salt,
        0.0 if is_fixed else control.min_confidence(context),
        0.0 if goes_on else control.min_reach(context, method),
    )


def _columns(features: Features, layers: tuple[int, ...], needed: tuple[int, ...]) -> Features:
    """The columns of `needed` layers, in that order, out of states that carry `layers` side by side."""
    if needed == layers:
        return features
    blocks = torch.tensor_split(features.states, len(layers), dim=1)
    return Features(features.start, torch.cat([blocks[layers.index(layer)] for layer in needed], dim=1))
