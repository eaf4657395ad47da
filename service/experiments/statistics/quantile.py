"""Quantiles from counts in bins that grow by a fixed ratio, the sketch of Masson, Rim and Lee (arXiv 1908.10693).

Counts add, so sketches of different fronts merge exactly, and their size does not grow with the data. Requests of one
user or one time slot are alike, and then an interval that takes them for independent is too narrow: counts are kept in
a fixed number of groups, each holding whole units, and what their scatter shows above a binomial's is the design
effect, by which the number of observations is divided before the exact interval is taken [Korn and Graubard 1998].
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from service.experiments.statistics.sequence import Interval, proportion_interval, rank_interval

Floats = npt.NDArray[np.float64]

GROWTH = 1.04
"""Ratio of a bin's ends: a quantile is within 2 % of the observation it stands for."""
SMALLEST = 1e-6
NUM_BINS = 600
"""From a microsecond to over four hours; what lies outside counts in the last bin of its side."""
NUM_GROUPS = 32


class Quantile(NamedTuple):
    """A quantile's estimate and the interval around it. NaN and unbounded without data."""

    value: float
    interval: Interval


def bin_of(value: float) -> int:
    if value <= SMALLEST:
        return 0
    return int(min(math.log(value / SMALLEST) / math.log(GROWTH), NUM_BINS - 1))


class SampleSize(NamedTuple):
    """How many observations there were, and of how many independent units."""

    observations: float
    units: float


def quantile(counts: Floats, probability: float, *, alpha: float, size: SampleSize) -> Quantile:
    """The `probability` quantile of what was counted, with an interval that holds at every look.

    counts: (groups, bins), weighted; one group if observations are independent and weigh the same.
    """
    total = counts.sum()
    if total <= 0.0 or size.observations <= 0.0:
        return Quantile(math.nan, Interval(0.0, math.inf))
    cumulative = counts.sum(0).cumsum() / total
    at = int(np.searchsorted(cumulative, probability - 1e-12))
    below = counts[:, : at + 1].sum(1)
    trials = effective_trials(below, counts.sum(1), size)
    low, high = rank_interval(probability, trials, alpha=alpha)
    low_bin = int(np.searchsorted(cumulative, low / trials))
    lower = 0.0 if low <= 0.0 else SMALLEST * GROWTH**low_bin
    high_bin = int(np.searchsorted(cumulative, high / trials, side="right"))
    upper = math.inf if high >= trials else SMALLEST * GROWTH ** (high_bin + 1)
    return Quantile(SMALLEST * GROWTH ** (at + 0.5), Interval(lower, upper))


def proportion(hits: Floats, totals: Floats, *, alpha: float, size: SampleSize) -> Quantile:
    """Share of observations that are hits, with its interval. hits, totals: (groups,)."""
    total = totals.sum()
    if total <= 0.0:
        return Quantile(math.nan, Interval(0.0, 1.0))
    share = float(hits.sum() / total)
    trials = effective_trials(hits, totals, size)
    return Quantile(share, proportion_interval(share * trials, trials, alpha=alpha))


def effective_trials(hits: Floats, totals: Floats, size: SampleSize) -> float:
    """How many independent observations would scatter as little as these groups do. hits, totals: (groups,)."""
    if len(totals) == 1:
        return size.observations
    num_groups = np.count_nonzero(totals)
    total = totals.sum()
    share = hits.sum() / total
    if num_groups < 2 or not 0.0 < share < 1.0:
        # Nothing scatters yet: one unit may still be all alike.
        return min(size.observations, size.units)
    scatter = np.square(hits - share * totals).sum() * num_groups / (num_groups - 1)
    # The scatter of few groups is itself uncertain: widened as Student's tail is at three standard errors.
    caution = (special.stdtrit(num_groups - 1, special.ndtr(-3.0)) / 3.0) ** 2
    return float(min(total * total * share * (1.0 - share) / (scatter * caution), size.observations))
