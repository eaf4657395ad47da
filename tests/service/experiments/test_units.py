from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.experiments.statistics.units import HASH_BITS, MAX_UNITS, add_unit, cut, merged, num_units, units_by_arm


def sample(seed: int, num: int) -> dict[int, int]:
    rng = np.random.default_rng(seed)
    return {int(unit): int(unit) % 2 for unit in rng.integers(0, 2**HASH_BITS, num)}


@given(st.lists(st.integers(0, 3000), min_size=3, max_size=3))
def test_samples_merge_in_any_order(sizes: list[int]) -> None:
    """Merging is commutative, associative and idempotent."""
    a, b, c = (sample(seed, size) for seed, size in enumerate(sizes))
    assert merged(a, b) == merged(b, a)
    assert merged(merged(a, b), c) == merged(a, merged(b, c))
    assert merged(a, a) == cut(a)


def test_a_sample_is_bounded_and_uniform() -> None:
    """Of 50,000 units the sample keeps a fixed number, in the arms' proportions, and knows how many there were."""
    kept: dict[int, int] = {}
    for unit, arm in sample(1, 50_000).items():
        add_unit(kept, unit, arm)
    assert len(kept) < 2 * MAX_UNITS
    assert sum(units_by_arm(kept, 2)) == MAX_UNITS
    assert units_by_arm(kept, 2)[0] == pytest.approx(MAX_UNITS / 2, rel=0.06)
    assert num_units(kept) == pytest.approx(50_000, rel=0.06)


def test_a_unit_counts_once() -> None:
    """However often a unit comes, it is one."""
    kept: dict[int, int] = {}
    for _ in range(1000):
        add_unit(kept, 7, 1)
    assert num_units(kept) == 1.0
    assert units_by_arm(kept, 2) == [0, 1]
