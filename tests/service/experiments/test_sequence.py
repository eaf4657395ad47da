from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from service.experiments.statistics.sequence import half_width, proportion_interval, rank_interval, share_evidence


def test_the_boundary_is_the_normal_mixture_s() -> None:
    """With many degrees of freedom the width is the published formula, worked out by hand."""
    expected = 0.03 * math.sqrt((1 + 0.03**2 / 0.1**2) * math.log((1 + 0.1**2 / 0.03**2) / 0.05**2))
    assert float(half_width(0.03, 1e9, alpha=0.05, scale=0.1)) == pytest.approx(expected, rel=1e-6)


def test_a_sum_of_normal_steps_is_rarely_ever_outside() -> None:
    """Of 2,000 normal walks of 3,000 steps, with a look after each, at most 5 % ever leave the interval."""
    steps = np.arange(1, 3001)
    walks = np.random.default_rng(1).standard_normal((2000, 3000)).cumsum(1) / steps
    width = half_width(1.0 / np.sqrt(steps), np.full(3000, 1e9), alpha=0.05, scale=0.1)
    ever_outside = (np.abs(walks) > width).any(1).mean()
    assert 0.01 < ever_outside < 0.05


@given(st.floats(1e-4, 10.0), st.floats(1.0, 1e4), st.floats(1e-3, 0.2))
def test_fewer_degrees_of_freedom_never_narrow(error: float, freedom: float, alpha: float) -> None:
    """An uncertain variance makes the interval wider, a certain one is the normal limit."""
    width = float(half_width(error, freedom, alpha=alpha, scale=0.1))
    assert width >= float(half_width(error, 2.0 * freedom, alpha=alpha, scale=0.1)) >= 0.0


def test_without_degrees_of_freedom_nothing_is_known() -> None:
    """One cluster an arm says nothing about variance, however small it looks."""
    assert np.isinf(half_width([0.0, 0.1], [0.0, 0.5], alpha=0.05, scale=0.1)).all()


@given(st.integers(1, 500), st.data())
def test_a_proportion_s_interval_holds_its_estimate(trials: int, data: st.DataObject) -> None:
    """The share that was seen is never excluded, and the ends stay within 0 and 1."""
    hits = data.draw(st.integers(0, trials))
    low, high = proportion_interval(hits, trials, alpha=0.05)
    assert 0.0 <= low <= hits / trials <= high <= 1.0


def test_a_proportion_s_interval_covers_at_every_look() -> None:
    """With 5 % failures and a look after each of 500 requests, the interval ever misses in at most 5 % of 300 runs."""
    rng = np.random.default_rng(2)
    ends = {}
    misses = 0
    for run in (rng.random((300, 500)) < 0.05).cumsum(1):
        for trials in range(10, 501, 10):
            hits = int(run[trials - 1])
            if (hits, trials) not in ends:
                ends[hits, trials] = proportion_interval(hits, trials, alpha=0.05)
            if not ends[hits, trials].low <= 0.05 <= ends[hits, trials].high:
                misses += 1
                break
    assert misses <= 15


def test_no_failure_in_a_thousand_bounds_the_rate() -> None:
    """Zero of n leaves an upper end that shrinks like 1/n, above the fixed-sample rule of three."""
    high = proportion_interval(0, 1000, alpha=0.05).high
    assert 3.0 / 1000 < high < 10.0 / 1000


@pytest.mark.parametrize("trials", [50, 200, 5000])
def test_ranks_bracket_wider_than_a_single_look(trials: int) -> None:
    """The interval for every look contains the binomial interval for one look at the same level."""
    low, high = rank_interval(0.95, trials, alpha=0.05)
    assert low <= stats.binom.ppf(0.025, trials, 0.95)
    assert high >= stats.binom.ppf(0.975, trials, 0.95) or high == trials


def test_few_observations_do_not_bound_a_tail() -> None:
    """Twenty observations say nothing about how far the p95 may lie above them."""
    assert rank_interval(0.95, 20, alpha=0.05).high == 20


def test_a_fair_coin_seldom_looks_unfair() -> None:
    """At most a share of p of fair runs ever show evidence below p, at any of 5,000 looks."""
    flips = np.random.default_rng(3).random((500, 5000)) < 0.5
    excess = flips.cumsum(1) - 0.5 * np.arange(1, 5001)
    ever = [
        min(share_evidence(float(run[n - 1]), 0.25 * n, deviation=0.02) for n in range(50, 5001, 50)) for run in excess
    ]
    assert np.mean(np.array(ever) < 0.05) <= 0.05
    assert share_evidence(0.02 * 20_000, 0.25 * 20_000, deviation=0.02) < 0.001
