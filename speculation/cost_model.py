"""What a step costs, by the rows in it and what they attend to; and what drafting costs."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from itertools import pairwise
from math import exp, log
from statistics import median
from typing import NamedTuple

KNOTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 192, 256, 384, 512)
"""Numbers of rows whose cost is learned; between them it is interpolated."""
CALIBRATION_ROWS = (1, 16, 4, 2, 8, 3, 6, 32, 12, 24, 64)
"""Steps an engine should time at its start, several times each and interleaved, for `StepCostModel.calibrate`."""
CALIBRATION_ROWS_FAR = (1, 4, 16)
"""Those to be timed at a second, longer context, too."""

RECENT = 9
"""Steps that say how fast the machine is now."""
AGREEING = 5
"""Steps with as many rows that say by how much the curve is off there."""
FAST, SLOW = 0.3, 0.05
"""Share of that which is taken over at each further one, at first and when some hundred have been seen."""
CLIP = 0.15
"""A single step that deviates says no more of the steepness than one that is exp(±CLIP) off."""
STEEPER = 0.05
"""Share of what a step says of the steepness that is taken over."""
LEVERAGE = 4e-3
"""Squared; below it a step's size differs too little from those around it to say much."""
MOST_STRETCH = 16.0
OLD_DRAFTS = 0.02
"""Share of what is known of a level's price that one more draft replaces."""
SAME_DEPTH = 0.05
"""Variance of depths, in levels squared, below which they say little of what one more level costs."""
WARM_UP = 3
"""First drafts, which say little of what a level costs."""
MOST_LONGER = 1.5
"""A single draft that took longer than expected says no more of that than one that took so many times as long."""
STALE = 0.02
"""By how much, in logs, the curve may lag behind what was learned: drawing it anew takes time."""


class StepLoad(NamedTuple):
    """What makes a step long."""

    num_rows: int
    num_context_tokens: int = 0
    """Tokens of its sequences: their keys and values are read."""
    num_attended_tokens: int = 0
    """The same, counted for each row: scores are computed. A step without guesses has one row a sequence."""

    def plus(self, num_rows: int, num_attended_tokens: int) -> StepLoad:
        """With so many more rows in the same sequences."""
        return StepLoad(
            self.num_rows + num_rows, self.num_context_tokens, self.num_attended_tokens + num_attended_tokens
        )

    def times(self, factor: float) -> StepLoad:
        """With so many times as many sequences that are alike."""
        return StepLoad(*(round(factor * number) for number in self))


class StepCostModel:
    """Seconds of a step = the machine's pace × (curve(rows) + a × context tokens + b × attended tokens).

    The *pace* is the median of the last few steps against the rest: when everything becomes slower (a neighbour, a
    clock) everything becomes slower at once, also what was not seen for a while, and a single hiccup is no news. The
    *curve*, which decides how many rows pay, is learned from steps that deviate from those just before and behind
    them. If large ones do, it becomes steeper as a whole: on a machine that was busy at the start, all rows seemed to
    cost the same. Where steps of one size keep deviating, the curve follows their median there. It never falls with
    more rows. The prices of context are those of the start, in units of the pace.
    """

    def __init__(self) -> None:
        self._log_shape = [log(1 + 0.03 * (rows - 1)) for rows in KNOTS]
        """Before anything is known one more row costs three hundredths of the first."""
        self._num_seen = [0] * len(KNOTS)
        """Steps of each knot, those of the start not counted."""
        self._recent: deque[tuple[int, float, float]] = deque(maxlen=RECENT)
        """Of the last steps the knot, the log of how long they took against what the curve says, and the share of that
        which is for rows beyond the first."""
        self._surprises = [deque[float](maxlen=AGREEING) for _ in KNOTS]
        """By how much steps of each knot took longer than those around them, in logs."""
        self._context_price = 0.0
        self._attended_price = 0.0
        self._stretch = 1.0
        """How much steeper than drawn the curve is."""
        self._curve: list[float] = []
        self._undrawn = 0.0
        self._pace = 0.01
        self._redraw()

    def calibrate(self, samples: Iterable[tuple[StepLoad, float]]) -> None:
        """Start from timed steps, in seconds. Several of each load: the quick ones count, for hiccups only lengthen.

        With the same rows at two context lengths or more, the prices of context are fitted, too.
        """
        timed: dict[StepLoad, list[float]] = defaultdict(list)
        for load, seconds in samples:
            timed[load].append(seconds)
        if not timed:
            return
        quick = {load: sorted(values)[(len(values) - 1) // 4] for load, values in timed.items()}
        context_price, attended_price = _context_prices(quick)
        by_rows: dict[int, list[float]] = defaultdict(list)
        for load, seconds in quick.items():
            context = context_price * load.num_context_tokens + attended_price * load.num_attended_tokens
            by_rows[load.num_rows].append(max(seconds - context, seconds / 10))
        known = sorted((num_rows, median(values)) for num_rows, values in by_rows.items())
        self._pace = known[0][1]
        self._context_price, self._attended_price = context_price / self._pace, attended_price / self._pace
        self._log_shape = [log(_interpolate(known, rows) / self._pace) for rows in KNOTS]
        self._num_seen = [0] * len(KNOTS)
        self._stretch = 1.0
        self._recent.clear()
        self._redraw()

    def observe(self, load: StepLoad, seconds: float) -> None:
        """A step of decoding rows took this long, drafting not counted. Cheap enough for every step."""
        expected = self._relative(load)
        further = (self._curve_at(load.num_rows) - self._curve[0]) / expected
        self._recent.append((_nearest_knot(load.num_rows), log(max(seconds, 1e-9) / expected), further))
        middle = median([against for _, against, _ in self._recent])
        if len(self._recent) == RECENT:
            # Against the steps on both sides of it: where the pace jumps, a step belongs to one of the two.
            knot, against, further = self._recent[RECENT // 2]
            self._steepen(against - middle, further - median([each for *_, each in self._recent]))
            self._learn(knot, against - middle)
        self._pace = exp(middle)

    def num_seen(self, num_rows: int) -> int:
        """Steps with about so many rows that the curve has learned from."""
        return self._num_seen[_nearest_knot(num_rows)]

    def seconds(self, load: StepLoad) -> float:
        """What a step would take now."""
        return self._pace * self._relative(load)

    def rows_seconds(self, num_rows: int) -> float:
        """The part of it that depends on the number of rows alone."""
        return self._pace * self._curve_at(num_rows)

    def attention_seconds(self, num_tokens: int) -> float:
        """What it costs now that a row more attends to so many tokens that others read already."""
        return self._pace * self._attended_price * num_tokens

    def _relative(self, load: StepLoad) -> float:
        context = self._context_price * load.num_context_tokens + self._attended_price * load.num_attended_tokens
        return self._curve_at(load.num_rows) + context

    def _steepen(self, surprise: float, leverage: float) -> None:
        """A step whose share for further rows is larger than that of its neighbours took exp(`surprise`) times as long.

        Normalised least mean squares.
        """
        error = max(-CLIP, min(CLIP, surprise))
        self._stretch *= exp(STEEPER * error * leverage / (leverage**2 + LEVERAGE))
        self._stretch = max(1 / MOST_STRETCH, min(MOST_STRETCH, self._stretch))

    def _learn(self, knot: int, surprise: float) -> None:
        """A step with as many rows took exp(`surprise`) times what its neighbours in time would let expect."""
        self._num_seen[knot] += 1
        surprises = self._surprises[knot]
        surprises.append(surprise)
        if len(surprises) == AGREEING:
            change = max(FAST / (1 + self._num_seen[knot] / 20), SLOW) * median(surprises)
            self._log_shape[knot] += change
            self._surprises[knot] = deque([each - change for each in surprises], maxlen=AGREEING)
            self._undrawn += abs(change)
            if self._undrawn > STALE:
                self._redraw()

    def _redraw(self) -> None:
        """The curve from its shape: where more rows look cheaper, neighbours share their mean.

        Sizes that run weigh most, so that a size whose timing at the start was unlucky gives way to them.
        """
        pools: list[tuple[float, float, int]] = []
        for value, seen in zip(self._log_shape, self._num_seen, strict=True):
            mean, weight, width = value, min(seen, 50) + 1.0, 1
            while pools and pools[-1][0] > mean:
                other, other_weight, other_width = pools.pop()
                mean = (mean * weight + other * other_weight) / (weight + other_weight)
                weight, width = weight + other_weight, width + other_width
            pools.append((mean, weight, width))
        self._curve = [value for mean, _, width in pools for value in [exp(mean)] * width]
        self._undrawn = 0.0

    def _curve_at(self, num_rows: int) -> float:
        first = self._curve[0]
        return first + self._stretch * (self._drawn_at(num_rows) - first)

    def _drawn_at(self, num_rows: int) -> float:
        i = bisect_left(KNOTS, num_rows)
        if i < len(KNOTS) and KNOTS[i] == num_rows:
            return self._curve[i]
        i = min(max(i, 1), len(KNOTS) - 1)
        low, high = KNOTS[i - 1], KNOTS[i]
        share = (num_rows - low) / (high - low)
        return self._curve[i - 1] + share * (self._curve[i] - self._curve[i - 1])


def _context_prices(seconds: Mapping[StepLoad, float]) -> tuple[float, float]:
    """Seconds a context token and an attended one, from steps that differ in nothing else but their context.

    Where rows are all of one sequence, a step of r rows costs (a + r × b) more for a token more.
    """
    slopes_by_rows: dict[int, list[float]] = defaultdict(list)
    for load, near in seconds.items():
        for other, far in seconds.items():
            if load.num_rows == other.num_rows and load.num_context_tokens < other.num_context_tokens:
                num_more = other.num_context_tokens - load.num_context_tokens
                slopes_by_rows[load.num_rows].append((far - near) / num_more)
    slopes = {num_rows: median(values) for num_rows, values in slopes_by_rows.items()}
    if not slopes:
        return 0.0, 0.0
    steeper = [(slopes[many] - slopes[few]) / (many - few) for few in slopes for many in slopes if few < many]
    attended = max(median(steeper), 0.0) if steeper else 0.0
    return max(median(slope - attended * rows for rows, slope in slopes.items()), 0.0), attended


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
    """What drafting for one sequence costs: the median of the last askings, so that one slow start is no news."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=15)
        self._num_drawn = 0
        self._depth = self._mean = 0.0
        """Averages over drafts that were drawn: levels, and seconds."""
        self._variance = self._covariance = 0.0
        """Of the levels, and of levels and seconds."""
        self.seconds = 0.0
        """Of one asking, found or not; 0 before any was timed."""
        self.seconds_per_level = 0.0
        """Of one more level of depth, for proposers that draft level by level: the first costs what is around it."""

    def observe(self, depth: float, seconds: float) -> None:
        """An asking (its share of a call that drafted for several) took this long, for a draft of this depth."""
        self._recent.append(seconds)
        self.seconds = median(self._recent)
        if depth > 0:
            self._num_drawn += 1
            if self._num_drawn > WARM_UP:
                self._learn_slope(depth, seconds)

    def _learn_slope(self, depth: float, seconds: float) -> None:
        """Least squares with older drafts fading, and half of a draft's time for its levels while all are as deep."""
        count = self._num_drawn - WARM_UP
        share = max(1 / count, OLD_DRAFTS)
        above = depth - self._depth
        if count > WARM_UP:
            seconds = min(seconds, MOST_LONGER * (self._mean + self.seconds_per_level * above))
        longer = seconds - self._mean
        self._depth += share * above
        self._mean += share * longer
        self._variance = (1 - share) * (self._variance + share * above * above)
        self._covariance = (1 - share) * (self._covariance + share * above * longer)
        average = self._mean / self._depth
        slope = (self._covariance + SAME_DEPTH * average / 2) / (self._variance + SAME_DEPTH)
        self.seconds_per_level = max(0.0, min(slope, average))
