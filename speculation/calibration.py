"""Timing a runner at start, so that the first request's draft length rests on measured costs."""

from __future__ import annotations

from collections.abc import Callable

from cache_store.block_pool import BlockPool, BlockTable
from speculation.cost_model import CALIBRATION_ROWS, CALIBRATION_ROWS_FAR, StepLoad
from target.layout import BatchEntry, lay_out, slots_of
from target.runner import Runner
from target.sampling import SamplingRow, sample
from target.sampling_params import SamplingParams

REPETITIONS = 5
NEAR, FAR = 64, 1024
"""Tokens of context."""


def time_steps(
    runner: Runner,
    pool: BlockPool,
    clock: Callable[[], float],
    *,
    max_model_len: int,
    max_seconds: float = 1.0,
) -> list[tuple[StepLoad, float]]:
    """Timed forwards in seconds, greedy sampling included, for `StepCostModel.calibrate`.

    All sizes that fit into `pool` and `max_model_len` take turns, so that a hiccup hits one repetition and not one
    size; those that say most come first. Stops after `max_seconds`. Gives the pool back as it found it.
    """
    sizes = _sizes(min(max_model_len, pool.num_available * pool.block_size))
    table = pool.open(b"")
    samples: list[tuple[StepLoad, float]] = []
    try:
        reserved = pool.reserve(table, max((num_rows + context for num_rows, context in sizes), default=0))
        assert reserved, "room was counted before"
        # Memory that was never written is one page of zeros, and quicker to read than memory that was.
        slots = slots_of(table.block_ids, 0, len(table.block_ids) * pool.block_size, pool.block_size)
        runner.kv_pool.move(slots, slots)
        for num_rows, context in sizes[:1]:  # a runner's first forward is like no other
            _time_step(runner, table, clock, num_rows, context)
        began = clock()
        for num_rows, context in sizes * REPETITIONS:
            if clock() - began > max_seconds:
                break
            samples.append(_time_step(runner, table, clock, num_rows, context))
    finally:
        pool.release(table)
    return samples


def _sizes(most: int) -> list[tuple[int, int]]:
    """Rows and context of what is timed, for sequences of at most so many tokens."""
    far = min(FAR, most - max(CALIBRATION_ROWS_FAR))
    sizes = [(num_rows, NEAR) for num_rows in CALIBRATION_ROWS if num_rows + NEAR <= most]
    return sizes + [(num_rows, far) for num_rows in CALIBRATION_ROWS_FAR if far >= 2 * NEAR]


def _time_step(
    runner: Runner, table: BlockTable, clock: Callable[[], float], num_rows: int, context: int
) -> tuple[StepLoad, float]:
    """One sequence of `context` tokens and `num_rows` more."""
    entry = BatchEntry(context, [0] * num_rows, table.block_ids, logits_from=0)
    batch = lay_out([entry], runner.kv_pool.block_size)
    rows = [SamplingRow(SamplingParams(temperature=0.0), context + i) for i in range(num_rows)]
    started = clock()
    sample(runner.forward(batch).logits, rows)
    return StepLoad(num_rows, context, num_rows * context), clock() - started
