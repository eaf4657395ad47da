"""How likely the target is to follow a guess: learned from what it did with earlier ones."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import exp

from draft.tree import Draft

CONFIDENCE_BOUNDS = (0.1, 0.2, 0.35, 0.5, 0.65, 0.75, 0.85, 0.92, 0.97)
"""A proposer's own confidences are told apart by these."""
MATCH_BOUNDS = (1, 2, 3, 4, 6, 9, 13)
"""Match lengths of lookups are told apart by these."""
DEPTH_BOUNDS = (2, 3, 5, 9)
HOT_TEMPERATURE = 0.5
"""From here on a request counts as sampling, whose guesses fare worse."""

PRIOR_WEIGHT = 4.0
"""Tested guesses that what is known of the wider class is worth."""
MEMORY = 300.0
"""Tested guesses after which a class's older ones fade."""
MAX_OFFSET = 3.0
"""A sequence differs from its class by at most this much, in log odds."""
FIRST_TRIAL, LAST_TRIAL = 8, 64


class Outcome(IntEnum):
    """What became of a sequence's last draft by a method. Who was right just now tends to be right again."""

    UNKNOWN = 0
    REJECTED = 1
    PARTLY = 2
    WHOLE = 3


NodeClass = tuple[str, bool, int, int]
"""Method, hot or not, depth's bucket, signal's bucket."""


@dataclass(slots=True)
class TrackRecord:
    """How one sequence's guesses by one method have fared."""

    offset: float = 0.0
    """Against those of their class, in log odds."""
    last: Outcome = Outcome.UNKNOWN
    num_tested: int = 0

    def learn(self, error: float) -> None:
        """A guess turned out `error` = outcome - expected."""
        self.num_tested += 1
        step = max(0.4 / (1 + self.num_tested / 8) ** 0.5, 0.04)
        self.offset = max(-MAX_OFFSET, min(MAX_OFFSET, self.offset + step * error))


class _Tally:
    """Guesses of one class."""

    __slots__ = ("accepted", "next_trial", "num_suppressed", "tested")

    def __init__(self) -> None:
        self.accepted = 0.0
        self.tested = 0.0
        self.num_suppressed = 0
        self.next_trial = FIRST_TRIAL

    def chance(self, prior: float) -> float:
        return (self.accepted + PRIOR_WEIGHT * prior) / (self.tested + PRIOR_WEIGHT)

    def count(self, *, was_accepted: bool) -> None:
        if self.tested >= MEMORY:
            self.accepted *= 1 - 1 / MEMORY
            self.tested *= 1 - 1 / MEMORY
        self.accepted += was_accepted
        self.tested += 1


class AcceptanceModel:
    """P(a node is accepted | its parent was), by class, corrected for each sequence.

    A class is the method, whether the request samples, the node's depth, and the proposer's signal: its own confidence
    in the node, else the length of the match the guess rests on, which grows by one a level. Within it those are told
    apart whose sequence's last draft was accepted whole, partly or not at all; what is known of few of them leans on
    the class, and a class of which little is known on the signal's face value.
    """

    def __init__(self) -> None:
        self._classes: dict[NodeClass, _Tally] = {}
        self._after: dict[tuple[NodeClass, Outcome], _Tally] = {}
        self._levels: dict[tuple[str, bool, int], _Tally] = {}
        """By method and depth, for guesses that are not drawn yet."""

    def path_chances(self, draft: Draft, temperature: float, record: TrackRecord) -> list[float]:
        """[n] for each node the chance that the target follows the path to and including it."""
        chances: list[float] = []
        for (key, prior), parent in zip(_classes_of(draft, temperature), draft.parents, strict=True):
            chance = self._chance(key, prior, record)
            chances.append(chance * chances[parent] if parent >= 0 else chance)
        return chances

    def chain_chances(self, method: str, temperature: float, depth: int, record: TrackRecord) -> list[float]:
        """[depth] the same for a chain that `method` would draft, before it is drawn."""
        chances: list[float] = []
        chance, path = 0.5, 1.0
        for level in range(1, depth + 1):
            tally = self._levels.get((method, temperature >= HOT_TEMPERATURE, level))
            chance = chance if tally is None else tally.chance(chance)
            path *= _shifted(chance, record.offset)
            chances.append(path)
        return chances

    def learn(self, draft: Draft, path: Sequence[int], temperature: float, record: TrackRecord) -> None:
        """`path` are the accepted nodes, root first. Their children, and the roots, were tested; nothing else was."""
        reached, accepted = {-1, *path}, set(path)
        levels: dict[int, bool] = {}
        depths = draft.depths
        for i, (key, prior) in enumerate(_classes_of(draft, temperature)):
            if draft.parents[i] not in reached:
                continue
            was_accepted = i in accepted
            record.learn(was_accepted - self._chance(key, prior, record))
            tally = self._classes.setdefault(key, _Tally())
            tally.count(was_accepted=was_accepted)
            self._after.setdefault((key, record.last), _Tally()).count(was_accepted=was_accepted)
            tally.num_suppressed = 0
            if was_accepted:
                tally.next_trial = FIRST_TRIAL
            levels[depths[i]] = levels.get(depths[i], False) or was_accepted
        for level, was_accepted in levels.items():
            key_of_level = draft.source, temperature >= HOT_TEMPERATURE, level
            self._levels.setdefault(key_of_level, _Tally()).count(was_accepted=was_accepted)
        record.last = Outcome.REJECTED if not path else Outcome.WHOLE if len(path) == max(depths) else Outcome.PARTLY

    def wants_trial(self, draft: Draft, temperature: float) -> bool:
        """Whether the first guess, which does not seem to pay, is verified once to see if that is still so.

        After 8 guesses of its class that were not, then 16, up to 64 while they go on failing.
        """
        key, _ = _classes_of(draft, temperature)[0]
        tally = self._classes.setdefault(key, _Tally())
        tally.num_suppressed += 1
        if tally.num_suppressed < tally.next_trial:
            return False
        tally.num_suppressed = 0
        tally.next_trial = min(2 * tally.next_trial, LAST_TRIAL)
        return True

    def _chance(self, key: NodeClass, prior: float, record: TrackRecord) -> float:
        chance = prior
        if (of_class := self._classes.get(key)) is not None:
            chance = of_class.chance(prior)
            if (after := self._after.get((key, record.last))) is not None:
                chance = after.chance(chance)
        return _shifted(chance, record.offset)


def _classes_of(draft: Draft, temperature: float) -> list[tuple[NodeClass, float]]:
    """[n] each node's class, and the chance it has while nothing was learned of it."""
    hot, source, confidences = temperature >= HOT_TEMPERATURE, draft.source, draft.confidences
    classes: list[tuple[NodeClass, float]] = []
    for i, depth in enumerate(draft.depths):
        level = bisect_right(DEPTH_BOUNDS, depth)
        if confidences is None:
            matched = draft.match_length + depth - 1
            classes.append(((source, hot, level, bisect_right(MATCH_BOUNDS, matched)), (matched + 1) / (matched + 3)))
        else:
            parent = draft.parents[i]
            local = confidences[i] / max(confidences[parent], 1e-9) if parent >= 0 else confidences[i]
            classes.append(((source, hot, level, bisect_right(CONFIDENCE_BOUNDS, local)), min(local, 0.98)))
    return classes


def _shifted(chance: float, log_odds: float) -> float:
    """The chance with its odds multiplied by exp(log_odds)."""
    if not log_odds:
        return chance
    chance = min(max(chance, 1e-6), 1 - 1e-6)
    return 1 / (1 + (1 - chance) / chance * exp(-log_odds))
