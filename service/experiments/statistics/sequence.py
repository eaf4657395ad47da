"""Intervals that hold at every look: somebody may watch the page all day and stop when they like what they see.

The interval around an asymptotically normal estimate with standard error s is the normal-mixture boundary

    estimate ± s · sqrt((1 + s²/τ²) · log((1 + τ²/s²) / α²)),

the asymptotic confidence sequence of Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas (arXiv 2103.06476) in the form
for an estimated variance process, with information 1/s² as its clock; it is also what the mixture sequential
probability ratio test of Johari, Pekelis and Walsh (arXiv 1512.04922) inverts to, with prior effect N(0, τ²). The first
reading is the one relied on: it holds for estimated variances and for any asymptotically linear estimate, such as
a ratio or a regression-adjusted mean. τ only decides where the interval is tightest (s near τ/3).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

Floats = npt.NDArray[np.float64]


class Interval(NamedTuple):
    """Both ends of an interval; infinite where the data do not bound that side."""

    low: float
    high: float


def half_width(standard_error: npt.ArrayLike, freedom: npt.ArrayLike, *, alpha: float, scale: float) -> Floats:
    """Half the width of the two-sided interval with miss probability `alpha` over all looks together.

    `standard_error` is that of the estimate now, `scale` is τ in the same unit, `freedom` the degrees of freedom behind
    the estimated variance: the boundary, a normal quantile, is replaced by Student's with the same tail, which keeps
    early looks and few clusters honest. Below one degree of freedom the width is infinite. Broadcasts.
    """
    error = np.asarray(standard_error, dtype=np.float64)
    degrees = np.asarray(freedom, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = np.square(error / scale)
        boundary = np.sqrt((1.0 + ratio) * (np.log1p(1.0 / ratio) - 2.0 * math.log(alpha)))
        width = error * _student(boundary, np.maximum(degrees, 1.0))
    width = np.where(error == 0.0, 0.0, width)
    return np.where((degrees < 1.0) | np.isnan(width), np.inf, width)


def _student(boundary: Floats, freedom: Floats) -> Floats:
    """Student's quantile with the tail of a normal one, by Wallace's formula [1959]: a little wide, never narrow.

    The exact quantile is lost to underflow where early looks need it, many standard errors out.
    """
    shrunk = boundary * (8.0 * freedom + 3.0) / (8.0 * freedom + 1.0)
    quantile: Floats = np.sqrt(freedom * np.expm1(np.square(shrunk) / freedom))
    return quantile


def proportion_interval(successes: float, trials: float, *, alpha: float) -> Interval:
    """Interval for a proportion, valid at every look without approximation: a beta-mixture martingale [Robbins 1970].

    A design effect enters as fewer `trials`, which need not be whole.
    """
    if trials <= 0.0:
        return Interval(0.0, 1.0)
    centre = successes / trials

    def excluded(proportion: float) -> bool:
        return _log_evidence(successes, trials, proportion, 0.5, 0.5) >= -math.log(alpha)

    low = 0.0 if successes <= 0.0 else _boundary(centre, 0.0, excluded)
    high = 1.0 if successes >= trials else _boundary(centre, 1.0, excluded)
    return Interval(low, high)


def rank_interval(probability: float, trials: float, *, alpha: float) -> Interval:
    """How many of `trials` observations may lie at or below their `probability` quantile, at every look.

    The number that do is a binomial count, whatever the distribution, so the observations at both ends of the interval
    bracket the quantile [Howard and Ramdas, arXiv 1906.09712]. An end at 0 or `trials` means: not bounded yet.
    """
    if trials <= 0.0:
        return Interval(0.0, 0.0)
    weight = 0.5 / min(probability, 1.0 - probability)
    successes, failures = weight * probability, weight * (1.0 - probability)

    def excluded(count: float) -> bool:
        return _log_evidence(count, trials, probability, successes, failures) >= -math.log(alpha)

    centre = probability * trials
    low = 0.0 if not excluded(0.0) else _boundary(centre, 0.0, excluded)
    high = trials if not excluded(trials) else _boundary(centre, trials, excluded)
    return Interval(low, high)


def share_evidence(excess: float, variance: float, *, deviation: float) -> float:
    """Evidence against a count having the mean it was drawn with: at most p by chance at every look, in the form of p.

    `excess` is the observed count less the expected, `variance` the sum of p(1-p) over its draws; sharpest where
    the share is off by about `deviation`.
    """
    prior = deviation * deviation * 16.0
    log_e = prior * excess * excess / (2.0 * (1.0 + prior * variance)) - 0.5 * math.log1p(prior * variance)
    return math.exp(-max(log_e, 0.0))


def _log_evidence(successes: float, trials: float, proportion: float, a: float, b: float) -> float:
    """Log of a beta(a, b) mixture's likelihood over that of `proportion`."""
    if not 0.0 < proportion < 1.0:
        return math.inf
    failures = trials - successes
    mixture = float(special.betaln(a + successes, b + failures) - special.betaln(a, b))
    return mixture - successes * math.log(proportion) - failures * math.log1p(-proportion)


def _boundary(inside: float, outside: float, excluded: Callable[[float], bool]) -> float:
    """Where exclusion begins on the way from a point that is not excluded to one that is; the excluded side of it."""
    for _ in range(50):
        middle = 0.5 * (inside + outside)
        if excluded(middle):
            outside = middle
        else:
            inside = middle
    return outside
