from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.experiments.statistics.allocation import best_probabilities, thompson_weights


def test_equal_arms_are_equally_likely_the_best() -> None:
    """Without a difference nobody is preferred."""
    assert best_probabilities(np.zeros(3), np.full(3, 0.1)) == pytest.approx([1 / 3] * 3)


def test_two_arms_follow_the_normal_law() -> None:
    """One standard error of the difference apart, the lower arm is the best with probability 0.841."""
    error = 0.1 / np.sqrt(2.0)
    assert best_probabilities(np.array([0.0, 0.1]), np.full(2, error))[0] == pytest.approx(0.8413, abs=1e-3)


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(0.0, 3.0)), min_size=2, max_size=8))
def test_no_arm_falls_below_the_floor(arms: list[tuple[float, float]]) -> None:
    """Weights sum to 1 and respect the floor, whatever the estimates."""
    estimates, errors = np.array(arms).T
    weights = thompson_weights(estimates, errors, floor=0.1)
    assert sum(weights) == pytest.approx(1.0)
    assert min(weights) >= 0.1 - 1e-12


def test_the_faster_arm_gets_what_the_floor_leaves() -> None:
    """A clear difference sends all but the floor to the arm with less time per token."""
    assert thompson_weights(np.array([0.0, -1.0]), np.full(2, 0.01), floor=0.1) == pytest.approx([0.1, 0.9])
