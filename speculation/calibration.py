"""Timing a runner at start, so that the first request's draft length rests on measured costs."""

from __future__ import annotations

from collections.abc import Callable

from cache_store.block_pool import BlockPool
from speculation.cost_model import CALIBRATION_ROWS
from target.layout import BatchEntry, lay_out
from target.runner import Runner
from target.sampling import SamplingRow, sample
from target.sampling_params import SamplingParams

REPETITIONS = 3
CONTEXT_TOKENS = 64


def time_steps(
    runner: Runner, pool: BlockPool, clock: Callable[[], float], *, max_seconds: float = 2.0
) -> list[tuple[int, int, float]]:
    """Timed forwards as (rows, context tokens, seconds), greedy sampling included, for `StepCostModel.calibrate`.

    All row counts take turns, so that a hiccup hits one repetition and not one row count. Stops after `max_seconds`.
    Borrows blocks of `pool`, and gives them back as it found them.
    """
    table = pool.open(b"")
    samples: list[tuple[int, int, float]] = []
    began = clock()
    try:
        for _ in range(1 + REPETITIONS):
            for num_rows in CALIBRATION_ROWS:
                if clock() - began > max_seconds or not pool.reserve(table, CONTEXT_TOKENS + num_rows):
                    continue
                batch = lay_out(
                    [BatchEntry(CONTEXT_TOKENS, [0] * num_rows, table.block_ids, logits_from=0)], pool.block_size
                )
                rows = [SamplingRow(SamplingParams(temperature=0.0), CONTEXT_TOKENS + i) for i in range(num_rows)]
                started = clock()
                sample(runner.forward(batch).logits, rows)
                samples.append((num_rows, CONTEXT_TOKENS, clock() - started))
    finally:
        pool.release(table)
    return samples[len(CALIBRATION_ROWS) :] or samples
