"""What a step costs, by the number of rows in it; and what drafting costs."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable
from itertools import pairwise
from math import exp, log
from statistics import median

KNOTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 192, 256, 384, 512)
"""Numbers of rows whose cost is learned; between them it is interpolated."""
CALIBRATION_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
"""Steps an engine should time at its start, several times each and interleaved, for `StepCostModel.calibrate`."""

RECENT = 9
SLOW = 0.02
"""Share of an observation that enters the curve's shape, once it is known."""
CLIP = 0.25
"""An observation moves the curve's shape as if it were at most exp(±CLIP) off: hiccups are no news."""


class StepCostModel:
    """Seconds of a step = machine's pace × curve(rows) + seconds per context token × context tokens.

    The curve's *shape*, which decides how many rows pay, is learned slowly, knot by knot, and never falls with more
    rows. The *pace* is the median of the last few observations against the shape: when everything becomes slower (a
    neighbour, a clock, long contexts) all row counts become slower at once, also those not seen for a while.
    """

    def __init__(self) -> None:
        self._log_shape = [log(1 + 0.03 * (rows - 1)) for rows in KNOTS]
        """Before anything is known one more row costs three hundredths of the first."""
        self._num_seen = [0] * len(KNOTS)
        self._paces: deque[float] = deque([log(0.01)], maxlen=RECENT)
        self._seconds_per_context_token = 0.0
        self._num_observed = 0
        self._curve: list[float] = []
        self._redraw()

    def calibrate(self, samples: Iterable[tuple[int, int, float]]) -> None:
        """Start from timed steps: (rows, context tokens, seconds). Several of each, so that hiccups cancel.

        With the same rows at two context lengths or more, the price of context is fitted, too.
        """
        timed: dict[tuple[int, int], list[float]] = defaultdict(list)
        for num_rows, num_context_tokens, seconds in samples:
            timed[num_rows, num_context_tokens].append(seconds)
        medians = {key: median(values) for key, values in timed.items()}
        if not medians:
            return
        self._fit_context(medians)
        by_rows: dict[int, list[float]] = defaultdict(list)
        for (num_rows, num_context_tokens), seconds in medians.items():
            by_rows[num_rows].append(self._without_context(num_context_tokens, seconds))
        known = sorted((num_rows, median(values)) for num_rows, values in by_rows.items())
        self._log_shape = [log(_interpolate(known, rows) / known[0][1]) for rows in KNOTS]
        self._num_seen = [20] * len(KNOTS)
        self._paces.clear()
        self._paces.append(log(known[0][1]))
        self._num_observed += 1
        self._redraw()

    def observe(self, num_rows: int, num_context_tokens: int, seconds: float) -> None:
        """A step of decoding rows took this long, drafting not counted. Cheap enough for every step."""
        knot = _nearest_knot(num_rows)
        measured = log(self._without_context(num_context_tokens, seconds))
        expected = log(self._curve_at(num_rows))
        if not self._num_observed:
            self._paces.clear()
        self._num_observed += 1
        self._paces.append(measured - expected)
        surprise = measured - expected - median(self._paces)
        self._num_seen[knot] += 1
        rate = max(SLOW, 1 / (1 + self._num_seen[knot]))
        self._log_shape[knot] += rate * max(-CLIP, min(CLIP, surprise))
        self._redraw()

    def seconds(self, num_rows: int, num_context_tokens: int = 0) -> float:
        """What a step of `num_rows` rows would take now."""
        return self._pace * self._curve_at(num_rows) + self._seconds_per_context_token * num_context_tokens

    def _without_context(self, num_context_tokens: int, seconds: float) -> float:
        return max(seconds - self._seconds_per_context_token * num_context_tokens, seconds / 10, 1e-9)

    def _fit_context(self, medians: dict[tuple[int, int], float]) -> None:
        slopes = []
        for (num_rows, context), seconds in medians.items():
            for (other_rows, other_context), other_seconds in medians.items():
                if num_rows == other_rows and context < other_context:
                    slopes.append((other_seconds - seconds) / (other_context - context))
        self._seconds_per_context_token = max(median(slopes), 0.0) if slopes else 0.0

    def _redraw(self) -> None:
        """The curve from its shape: where noise makes more rows look cheaper, neighbours share their mean."""
        pools: list[tuple[float, float, int]] = []
        for value, seen in zip(self._log_shape, self._num_seen, strict=True):
            mean, weight, width = value, min(seen, 50) + 0.1, 1
            while pools and pools[-1][0] > mean:
                other, other_weight, other_width = pools.pop()
                mean = (mean * weight + other * other_weight) / (weight + other_weight)
                weight, width = weight + other_weight, width + other_width
            pools.append((mean, weight, width))
        self._curve = [exp(mean) for mean, _, width in pools for _ in range(width)]
        self._pace = exp(median(self._paces))

    def _curve_at(self, num_rows: int) -> float:
        i = bisect_left(KNOTS, num_rows)
        if i < len(KNOTS) and KNOTS[i] == num_rows:
            return self._curve[i]
        i = min(max(i, 1), len(KNOTS) - 1)
        low, high = KNOTS[i - 1], KNOTS[i]
        share = (num_rows - low) / (high - low)
        return max(self._curve[i - 1] + share * (self._curve[i] - self._curve[i - 1]), 0.0)


def _nearest_knot(num_rows: int) -> int:
    i = bisect_left(KNOTS, num_rows)
    if i == len(KNOTS):
        return i - 1
    return i if i == 0 or KNOTS[i] - num_rows <= num_rows - KNOTS[i - 1] else i - 1


def _interpolate(points: list[tuple[int, float]], x: int) -> float:
    """Piecewise linear through `points`; flat below the first, the last slope going on above the last."""
    if x <= points[0][0] or len(points) == 1:
        return points[0][1]
    for (low, low_value), (high, high_value) in pairwise(points):
        if x <= high or high == points[-1][0]:
            return max(low_value + (x - low) / (high - low) * (high_value - low_value), low_value)
    raise AssertionError("pairs end with the last point")


class DraftingCost:
    """What drafting for one sequence costs: medians of the last askings, so that one slow start is no news."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=15)
        self._seconds_per_level: deque[float] = deque(maxlen=15)
        self.seconds = 0.0
        """Of one asking, found or not; 0 before any was timed."""
        self.seconds_per_level = 0.0
        """Of one level of depth, for proposers that draft level by level."""

    def observe(self, depth: float, seconds: float) -> None:
        """An asking (its share of a call that drafted for several) took this long, for a draft of this depth."""
        self._seconds.append(seconds)
        self.seconds = median(self._seconds)
        if depth > 0:
            self._seconds_per_level.append(seconds / depth)
            self.seconds_per_level = median(self._seconds_per_level)
