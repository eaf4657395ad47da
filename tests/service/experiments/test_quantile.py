from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.experiments.statistics.quantile import (
    GROWTH,
    NUM_BINS,
    NUM_GROUPS,
    SMALLEST,
    SampleSize,
    bin_of,
    proportion,
    quantile,
)

Floats = npt.NDArray[np.float64]


def sketch(values: Floats, groups: npt.NDArray[np.int64] | None = None) -> Floats:
    counts = np.zeros((1 if groups is None else NUM_GROUPS, NUM_BINS))
    for index, value in enumerate(values):
        counts[0 if groups is None else groups[index], bin_of(float(value))] += 1.0
    return counts


@given(st.floats(2e-6, 1e4))
def test_a_bin_holds_its_value(value: float) -> None:
    """The ends of a value's bin enclose it."""
    low = SMALLEST * GROWTH ** bin_of(value)
    assert low * (1 - 1e-9) <= value <= low * GROWTH * (1 + 1e-9)


@pytest.mark.parametrize("value", [0.0, -1.0, 1e-9, 1e12, math.inf])
def test_what_lies_outside_is_in_an_end_bin(value: float) -> None:
    """No time is too short or too long to be counted."""
    assert bin_of(value) in {0, NUM_BINS - 1}


def test_a_quantile_is_within_two_per_cent_of_the_data_s() -> None:
    """p50 and p95 of 5,000 log-normal times agree with those of the data, inside their intervals."""
    values = np.random.default_rng(1).lognormal(-2.0, 0.7, 5000)
    for probability in (0.5, 0.95):
        found = quantile(sketch(values), probability, alpha=0.05, size=SampleSize(5000, 5000))
        exact = np.quantile(values, probability)
        assert found.value == pytest.approx(exact, rel=0.03)
        assert found.interval.low < exact < found.interval.high < 1.25 * exact


def test_intervals_cover_at_every_look() -> None:
    """Over 200 runs with a look after every 20 requests, a p95's interval ever misses it in at most 5 %."""
    rng, truth = np.random.default_rng(2), math.exp(0.5 * 1.6448536)
    misses = 0
    for _ in range(200):
        counts = np.zeros((1, NUM_BINS))
        for number, value in enumerate(rng.lognormal(0.0, 0.5, 600), 1):
            counts[0, bin_of(float(value))] += 1.0
            if number % 20 == 0:
                low, high = quantile(counts, 0.95, alpha=0.05, size=SampleSize(number, number)).interval
                if not low <= truth <= high:
                    misses += 1
                    break
    assert misses <= 10


def test_alike_requests_of_one_unit_widen_the_interval() -> None:
    """When each of 60 units repeats its own time 50 times, the interval is far wider than for 3,000 free requests."""
    rng = np.random.default_rng(3)
    of_unit, unit = rng.lognormal(0.0, 0.5, 60), np.repeat(np.arange(60), 50)
    size = SampleSize(3000, 60)
    alike = quantile(sketch(of_unit[unit], unit % NUM_GROUPS), 0.95, alpha=0.05, size=size).interval
    free = quantile(sketch(rng.lognormal(0.0, 0.5, 3000), unit % NUM_GROUPS), 0.95, alpha=0.05, size=size).interval
    assert math.log(alike.high / alike.low) > 2.0 * math.log(free.high / free.low)


def test_no_failure_is_worth_as_many_trials_as_there_are_units() -> None:
    """While nothing has failed, requests of one unit may all be alike, so only units count."""
    none, all_ = np.zeros(NUM_GROUPS), np.full(NUM_GROUPS, 100.0)
    few = proportion(none, all_, alpha=0.05, size=SampleSize(3200, 40)).interval.high
    many = proportion(none, all_, alpha=0.05, size=SampleSize(3200, 3200)).interval.high
    assert few > 10.0 * many


def test_without_data_nothing_is_bounded() -> None:
    """An empty sketch has no value and the widest interval."""
    found = quantile(np.zeros((1, NUM_BINS)), 0.95, alpha=0.05, size=SampleSize(0, 0))
    assert math.isnan(found.value)
    assert found.interval == (0.0, math.inf)
    assert proportion(np.zeros(1), np.zeros(1), alpha=0.05, size=SampleSize(0, 0)).interval == (0.0, 1.0)
