"""The step-cost model: learned at start, kept current, deaf to hiccups."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculation.cost_model import CALIBRATION_ROWS, DraftingCost, StepCostModel


def truth(num_rows: int) -> float:
    """A machine's step: 4 ms, and 1 ms for each further row."""
    return 0.003 + 0.001 * num_rows


def calibrated() -> StepCostModel:
    costs = StepCostModel()
    costs.calibrate((rows, 0, truth(rows)) for rows in CALIBRATION_ROWS)
    return costs


@pytest.mark.parametrize("num_rows", [1, 2, 5, 7, 8, 11, 16, 30, 64, 100, 300])
def test_calibrated_it_knows_every_number_of_rows(num_rows: int) -> None:
    """Timed row counts are known, those between are interpolated, and the last slope goes on."""
    assert calibrated().seconds(num_rows) == pytest.approx(truth(num_rows), rel=0.02)


def test_hiccups_in_calibration_cancel() -> None:
    """Of several timings of one size the median counts."""
    costs = StepCostModel()
    costs.calibrate((rows, 0, truth(rows) * factor) for rows in (1, 4, 16) for factor in (1, 1, 9, 1, 0.9))
    assert costs.seconds(4) == pytest.approx(truth(4), rel=0.01)


def test_the_price_of_context_is_fitted() -> None:
    """Steps timed at two context lengths give a price a token, which is then added to every prediction."""
    costs = StepCostModel()
    costs.calibrate((rows, context, truth(rows) + 1e-6 * context) for rows in (1, 4, 16) for context in (100, 4000))
    assert costs.seconds(4, 2000) - costs.seconds(4, 0) == pytest.approx(0.002, rel=0.02)
    assert costs.seconds(4, 0) == pytest.approx(truth(4), rel=0.02)


def test_it_learns_the_curve_from_steps_alone() -> None:
    """Not calibrated, it comes to know the sizes it sees, through noise and a hiccup in twenty."""
    rng = random.Random(0)
    costs = StepCostModel()
    for _ in range(1500):
        rows = rng.choice((1, 4, 8, 16))
        costs.observe(rows, 0, truth(rows) * rng.uniform(0.9, 1.1) * (8 if rng.random() < 0.05 else 1))
    for rows in (1, 4, 8, 16):
        assert costs.seconds(rows) / costs.seconds(1) == pytest.approx(truth(rows) / truth(1), rel=0.1)
    assert costs.seconds(1) == pytest.approx(truth(1), rel=0.15)


def test_a_slower_machine_is_slower_at_every_size() -> None:
    """When one size takes longer than it did, so will the sizes that were not seen since."""
    costs = calibrated()
    for _ in range(10):
        costs.observe(5, 0, 1.5 * truth(5))
    assert costs.seconds(1) == pytest.approx(1.5 * truth(1), rel=0.05)
    assert costs.seconds(16) == pytest.approx(1.5 * truth(16), rel=0.05)


def test_one_hiccup_changes_nothing() -> None:
    """A single step of a hundred times its length leaves the prediction where it was."""
    costs = calibrated()
    for _ in range(20):
        costs.observe(4, 0, truth(4))
    before = [costs.seconds(rows) for rows in (1, 4, 8)]
    costs.observe(4, 0, 100 * truth(4))
    assert [costs.seconds(rows) for rows in (1, 4, 8)] == pytest.approx(before, rel=0.03)


@given(st.lists(st.tuples(st.integers(1, 600), st.integers(0, 9000), st.floats(1e-4, 1.0)), max_size=60))
def test_more_rows_never_look_cheaper(observations: list[tuple[int, int, float]]) -> None:
    """Whatever was measured, the curve is positive and does not fall."""
    costs = StepCostModel()
    for rows, context, seconds in observations:
        costs.observe(rows, context, seconds)
    curve = [costs.seconds(rows) for rows in range(1, 700)]
    assert curve[0] > 0
    assert all(low <= high * (1 + 1e-9) for low, high in pairwise(curve))


def test_nothing_to_calibrate_from_changes_nothing() -> None:
    """An engine that timed no steps starts from the same guess as one that did not try."""
    costs = StepCostModel()
    costs.calibrate([])
    assert costs.seconds(8) == StepCostModel().seconds(8)


def test_drafting_costs_are_medians() -> None:
    """A slow first draft is no news; cost a level counts drafts that were drawn."""
    cost = DraftingCost()
    assert (cost.seconds, cost.seconds_per_level) == (0.0, 0.0)
    for depth, seconds in ((0, 0.5), (4, 0.004), (0, 0.001), (2, 0.002), (8, 0.008)):
        cost.observe(depth, seconds)
    assert cost.seconds == pytest.approx(0.004)
    assert cost.seconds_per_level == pytest.approx(0.001)
