"""How an experiment's intervals went: enough points for a plot, however long it ran."""

from __future__ import annotations

import msgspec

from service.experiments.report import Effect, Report
from service.experiments.store import StoredValueError

MAX_POINTS = 400


class TracedEffect(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison at one time."""

    arm: str
    against: str
    adjusted: Effect
    unadjusted: Effect


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One look. `at`: seconds since the epoch."""

    at: float
    num_samples: int
    by_arm: list[int]
    effects: list[TracedEffect]


class Trace(msgspec.Struct, kw_only=True):
    """Looks in order; when there are too many, every second one is dropped and looks are kept half as often."""

    points: list[Point] = []
    stride: int = 1
    skipped: int = 0

    @classmethod
    def decode(cls, stored: bytes | None) -> Trace:
        """The trace that a store has kept; an empty one for None. Raises `StoredValueError` for what is none."""
        if not stored:
            return cls()
        try:
            return msgspec.msgpack.decode(stored, type=cls)
        except (ValueError, RecursionError) as error:
            raise StoredValueError(f"the stored trace cannot be read: {error}") from error

    def add(self, report: Report, now: float) -> bool:
        """Keep a look if it brought something new and its turn has come. Says whether the trace changed."""
        if self.points and self.points[-1].num_samples == report.num_samples:
            return False
        self.skipped += 1
        if self.points and self.skipped < self.stride:
            return False
        self.skipped = 0
        self.points.append(point_of(report, now))
        if len(self.points) > MAX_POINTS:
            self.points = self.points[::2]
            self.stride *= 2
        return True


def point_of(report: Report, now: float) -> Point:
    effects = [
        TracedEffect(arm=one.arm, against=one.against, adjusted=one.adjusted, unadjusted=one.unadjusted)
        for one in report.comparisons
    ]
    by_arm = [arm.analysed for arm in report.arms]
    return Point(at=now, num_samples=report.num_samples, by_arm=by_arm, effects=effects)
