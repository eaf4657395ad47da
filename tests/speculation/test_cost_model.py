"""The step-cost model: learned at start, kept current, deaf to hiccups."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.block_pool import BlockPool
from speculation.calibration import time_steps
from speculation.cost_model import CALIBRATION_ROWS, CALIBRATION_ROWS_FAR, DraftingCost, StepCostModel, StepLoad
from tests.tiny_model import TINY, tiny_runner


def truth(load: StepLoad | int) -> float:
    """A machine's step: 4 ms, 1 ms for each further row, and what its rows attend to."""
    load = StepLoad(load) if isinstance(load, int) else load
    return 0.003 + 0.001 * load.num_rows + 4e-7 * load.num_context_tokens + 3e-7 * load.num_attended_tokens


def of_one(num_rows: int, num_tokens: int) -> StepLoad:
    """Rows of one sequence."""
    return StepLoad(num_rows, num_tokens, num_rows * num_tokens)


LOADS = [of_one(rows, 64) for rows in CALIBRATION_ROWS] + [of_one(rows, 1024) for rows in CALIBRATION_ROWS_FAR]


def calibrated(factor: float = 1.0) -> StepCostModel:
    costs = StepCostModel()
    costs.calibrate((load, factor * truth(load)) for load in LOADS)
    return costs


@pytest.mark.parametrize("num_rows", [1, 2, 5, 7, 8, 11, 16, 30, 64, 100, 300])
def test_calibrated_it_knows_every_number_of_rows(num_rows: int) -> None:
    """Timed row counts are known, those between are interpolated, and the last slope goes on."""
    assert calibrated().seconds(StepLoad(num_rows)) == pytest.approx(truth(num_rows), rel=0.02)


def test_hiccups_in_calibration_cancel() -> None:
    """Of several timings of one size the quick ones count, without the one that is quicker than all."""
    costs = StepCostModel()
    costs.calibrate((StepLoad(rows), truth(rows) * factor) for rows in (1, 4, 16) for factor in (1, 3, 9, 1, 0.9))
    assert costs.seconds(StepLoad(4)) == pytest.approx(truth(4), rel=0.01)


@pytest.mark.parametrize(
    "load",
    [of_one(4, 0), of_one(4, 2000), of_one(1, 8000), StepLoad(16, 16 * 500, 16 * 500), StepLoad(20, 9000, 15000)],
)
def test_the_prices_of_context_are_fitted(load: StepLoad) -> None:
    """Timed at two lengths, it knows what tokens cost once a sequence, and what they cost once a row."""
    assert calibrated().seconds(load) == pytest.approx(truth(load), rel=0.02)


def test_it_learns_the_curve_from_steps_alone() -> None:
    """Not calibrated, it comes to know the sizes it sees, through noise and a hiccup in twenty."""
    rng = random.Random(0)
    costs = StepCostModel()
    for _ in range(1500):
        rows = rng.choice((1, 4, 8, 16))
        noise = rng.uniform(0.9, 1.1) * (8 if rng.random() < 0.05 else 1)
        costs.observe(StepLoad(rows), truth(rows) * noise)
    one = costs.seconds(StepLoad(1))
    for rows in (1, 4, 8, 16):
        assert costs.seconds(StepLoad(rows)) / one == pytest.approx(truth(rows) / truth(1), rel=0.1)
    assert one == pytest.approx(truth(1), rel=0.15)


def steps(seed: int, count: int) -> Iterator[StepLoad]:
    """Steps of up to four sequences that grow from 300 tokens, with drafts of up to seven."""
    rng = random.Random(seed)
    for step in range(count):
        num_sequences, num_guesses = rng.randint(1, 4), rng.choice((0, 0, 3, 7))
        tokens = 300 + 2 * step
        rows = num_sequences * (1 + num_guesses)
        yield StepLoad(rows, num_sequences * tokens, rows * tokens)


def error(costs: StepCostModel, load: StepLoad) -> float:
    return abs(costs.seconds(load) / truth(load) - 1)


@pytest.mark.parametrize("seed", range(5))
def test_a_start_on_a_busy_machine_is_made_good(seed: int) -> None:
    """Calibrated while everything took five times as long, it is within a fifth of the truth eight steps later."""
    costs, rng = calibrated(factor=5.0), random.Random(seed)
    for count, load in enumerate(steps(seed, 200)):
        if count >= 8:
            assert error(costs, load) < 0.2
        costs.observe(load, truth(load) * rng.uniform(0.95, 1.05) * (6 if rng.random() < 0.04 else 1))


@pytest.mark.parametrize("seed", range(5))
def test_a_start_in_which_some_sizes_were_unlucky_is_made_good(seed: int) -> None:
    """Where a third of the sizes seemed three times as slow as they are, the sizes that run are soon known."""
    costs, rng = StepCostModel(), random.Random(seed)
    costs.calibrate((load, truth(load) * rng.choice((1, 1, 3))) for load in LOADS)
    rows = (1, 4, 8)
    for _ in range(300):
        load = of_one(rng.choice(rows), 300)
        costs.observe(load, truth(load) * rng.uniform(0.95, 1.05))
    assert max(error(costs, of_one(num_rows, 300)) for num_rows in rows) < 0.2


@pytest.mark.parametrize("seed", range(3))
def test_a_curve_that_was_flat_at_the_start_becomes_steep_as_a_whole(seed: int) -> None:
    """Calibrated while each step took 50 ms more, it knows after 120 steps what many rows cost against few."""
    costs, rng = StepCostModel(), random.Random(seed)
    costs.calibrate((load, truth(load) + 0.05) for load in LOADS)
    for _ in range(120):
        load = StepLoad(rng.randint(8, 40))
        costs.observe(load, truth(load) * rng.uniform(0.95, 1.05))
    further = costs.rows_seconds(40) - costs.rows_seconds(8)
    assert further == pytest.approx(truth(40) - truth(8), rel=0.12)


def test_a_busy_moment_leaves_the_curve_as_it_was() -> None:
    """When everything takes four times as long for a while, predictions follow, and come back afterwards."""
    costs = calibrated()
    for _ in range(4):
        for factor in (1.0, 4.0):
            for load in steps(1, 40):
                costs.observe(load, factor * truth(load))
            assert costs.seconds(StepLoad(4)) == pytest.approx(factor * truth(4), rel=0.05)
    for _ in range(9):
        costs.observe(StepLoad(4), truth(4))
    for num_rows in (1, 2, 4, 8, 16):
        assert costs.seconds(StepLoad(num_rows)) == pytest.approx(truth(num_rows), rel=0.05)


def test_a_slower_machine_is_slower_at_every_size() -> None:
    """When one size takes longer than it did, so will the sizes that were not seen since."""
    costs = calibrated()
    for _ in range(10):
        costs.observe(StepLoad(5), 1.5 * truth(5))
    assert costs.seconds(StepLoad(1)) == pytest.approx(1.5 * truth(1), rel=0.05)
    assert costs.seconds(StepLoad(16)) == pytest.approx(1.5 * truth(16), rel=0.05)


def test_one_hiccup_changes_nothing() -> None:
    """A single step of a hundred times its length leaves the prediction where it was."""
    costs = calibrated()
    for _ in range(20):
        costs.observe(StepLoad(4), truth(4))
    before = [costs.seconds(StepLoad(rows)) for rows in (1, 4, 8)]
    costs.observe(StepLoad(4), 100 * truth(4))
    assert [costs.seconds(StepLoad(rows)) for rows in (1, 4, 8)] == pytest.approx(before, rel=0.03)


@given(st.lists(st.tuples(st.integers(1, 600), st.integers(0, 9000), st.floats(1e-4, 1.0)), max_size=60))
def test_more_rows_never_look_cheaper(observations: list[tuple[int, int, float]]) -> None:
    """Whatever was measured, the curve is positive and does not fall."""
    costs = StepCostModel()
    costs.calibrate((of_one(rows, context), seconds) for rows, context, seconds in observations[:20])
    for rows, context, seconds in observations:
        costs.observe(of_one(rows, context), seconds)
    curve = [costs.seconds(StepLoad(rows)) for rows in range(1, 700)]
    assert curve[0] > 0
    assert all(low <= high * (1 + 1e-9) for low, high in pairwise(curve))


def test_nothing_to_calibrate_from_changes_nothing() -> None:
    """An engine that timed no steps starts from the same guess as one that did not try."""
    costs = StepCostModel()
    costs.calibrate([])
    assert costs.seconds(StepLoad(8)) == StepCostModel().seconds(StepLoad(8))


@pytest.mark.parametrize(("max_model_len", "num_blocks", "far"), [(256, 100, 240), (256, 12, None), (70, 100, None)])
def test_an_engine_times_what_fits(max_model_len: int, num_blocks: int, far: int | None) -> None:
    """All sizes are timed at one context length, some at a second, as far as there is room; the pool is as before."""
    pool = BlockPool(num_blocks, 4)
    samples = time_steps(tiny_runner(TINY, num_blocks=num_blocks), pool, lambda: 0.0, max_model_len=max_model_len)
    loads = {load for load, _ in samples}
    longest = min(max_model_len, (num_blocks - 1) * 4)
    near = {of_one(rows, 64) for rows in CALIBRATION_ROWS if 64 + rows <= longest}
    assert loads == near | {of_one(rows, far) for rows in CALIBRATION_ROWS_FAR if far}
    assert len(samples) == 5 * len(loads)
    assert pool.num_free == num_blocks - 1
    pool.check()


def test_timing_an_engine_is_bounded() -> None:
    """Where a step takes a tenth of a second, four sizes are timed that say most, few rows and many."""
    now = iter(range(10_000))
    samples = time_steps(tiny_runner(num_blocks=100), BlockPool(100, 4), lambda: next(now) / 10, max_model_len=256)
    assert [load.num_rows for load, _ in samples] == [1, 16, 4, 2]


def test_drafting_costs_are_medians() -> None:
    """A slow first draft is no news."""
    cost = DraftingCost()
    assert (cost.seconds, cost.seconds_per_level) == (0.0, 0.0)
    for depth, seconds in ((0, 0.5), (4, 0.004), (0, 0.001), (2, 0.002), (8, 0.008)):
        cost.observe(depth, seconds)
    assert cost.seconds == pytest.approx(0.004)


@pytest.mark.parametrize("first", [0.0, 0.001])
def test_a_level_costs_what_deeper_drafts_take_longer(first: float) -> None:
    """Whatever comes before the first level; drafts that were not drawn, and hiccups, say nothing of it."""
    cost = DraftingCost()
    for i in range(60):
        cost.observe(0, 0.00001)
        cost.observe(1 + i % 4, 0.5 if i == 40 else first + 0.0005 * (1 + i % 4))
    assert cost.seconds_per_level == pytest.approx(0.0005, rel=0.2)


def test_drafts_of_one_depth_do_not_say_what_a_level_costs() -> None:
    """Half of their time is taken for it: neither so dear that nobody goes deeper, nor free."""
    cost = DraftingCost()
    for _ in range(10):
        cost.observe(2, 0.004)
    assert cost.seconds_per_level == pytest.approx(0.001)
