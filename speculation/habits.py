"""What asking the methods has brought: for each sequence, and for all that are like it."""

from __future__ import annotations

from dataclasses import dataclass, field

from draft.config import DraftBounds
from draft.tree import Draft
from speculation.acceptance import TrackRecord

FIRST_REACH = 8
"""Nodes a draft may have at first; twice as many after one that was worth keeping whole."""


@dataclass(slots=True)
class Habit:
    """What asking one method has brought: one sequence, or all of its class."""

    bounds: DraftBounds
    value: float = 0.3
    """Mean worth of its drafts, in tokens a step; while nothing is known, worth a try."""
    num_asked: int = 0
    record: TrackRecord = field(default_factory=TrackRecord)
    reach: int = FIRST_REACH
    has_confidences: bool = False
    pause: int = 0
    """Steps that it rested last."""
    wakes_at: int = 0
    """The first step in which it may be asked again."""
    num_known: int = 0
    """Tokens of the sequence when it was asked last."""
    appraised: tuple[Draft, list[float]] | None = None

    def note(self, value: float, rate: float) -> None:
        """Asking brought a draft of this worth."""
        self.num_asked += 1
        self.value += max(rate, 1 / (1 + self.num_asked)) * (value - self.value)


@dataclass(slots=True)
class SequenceHabits:
    """Those of one sequence."""

    temperature: float
    num_methods: int
    """That its config names."""
    habits: dict[str, Habit] = field(default_factory=dict)
    wakes_at: int = 0
    """The first step in which one of them may be asked."""

    def lay_down(self, habit: Habit, wakes_at: int) -> None:
        """A method is not to be asked before then."""
        habit.wakes_at = wakes_at
        if len(self.habits) == self.num_methods:
            self.wakes_at = min(each.wakes_at for each in self.habits.values())
