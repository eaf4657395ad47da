"""Attention over the paged cache, each row in its own logical order.

A unit is one row of a sequence, or two of the same where their queries' sums fit the registers together: they share the
loads of keys and values, and nothing else. A task is a unit and one key head with the query heads it serves.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from target.native.attention_tiles import TILE
from target.native.calls import call_kernel_at
from target.native.compiling import native
from target.native.rows import copy, encode, row_bytes
from target.native.threads import take_task
from target.native.vectors import (
    broadcast,
    exponential,
    keep_first,
    larger,
    load,
    load_float,
    load_integer,
    max_lanes,
    store,
    store_float,
    store_integer,
    sum_lanes,
)

Record = Any

UNIT_BYTES = 24
"""Bytes of a unit: its sequence, first row and number of rows, in int64."""


@native
def lay_units(model: Record, batch: Record) -> None:
    """Divide the rows of all sequences into units: their number, then the units, at `batch.units`."""
    count = 0
    for sequence in range(batch.num_sequences):
        row = load_integer(64, batch.row_starts + 8 * sequence)
        end = load_integer(64, batch.row_starts + 8 * sequence + 8)
        while row < end:
            rows = min(model.unit_rows, end - row)
            unit = batch.units + 8 + UNIT_BYTES * count
            store_integer(unit, sequence)
            store_integer(unit + 8, row)
            store_integer(unit + 16, rows)
            count += 1
            row += rows
    store_integer(batch.units, count)


@native
def attend_rows(model: Record, layer: Record, batch: Record, thread: int) -> None:
    """Attention of every row, encoded for the output product."""
    own = batch.scratch + thread * batch.scratch_stride
    num_tasks = load_integer(64, batch.units) * model.num_kv_heads
    while True:
        task = take_task(model.control, thread, model.num_threads, num_tasks)
        if task < 0:
            return
        _attend(model, layer, batch, own, task, num_tasks)


@native
def _attend(model: Record, layer: Record, batch: Record, own: int, task: int, num_tasks: int) -> None:
    kv_heads, size = model.num_kv_heads, model.head_size
    group, head = model.num_heads // kv_heads, task % kv_heads
    unit = batch.units + 8 + UNIT_BYTES * (task // kv_heads)
    sequence, first, rows = load_integer(64, unit), load_integer(64, unit + 8), load_integer(64, unit + 16)
    queries, out = own + batch.own_queries, own + batch.own_floats
    for r in range(rows):
        source = batch.queries + batch.queries_stride * (first + r) + 4 * size * group * head
        copy(source, group * size, queries + 4 * size * group * r)
    table = batch.tables + 8 * batch.table_width * sequence
    _score(model, layer, batch, own, table, sequence, first, rows, head)
    for r in range(rows):
        prefix, mask = _prefix(batch, sequence, first + r), load_integer(64, batch.tree_masks + 8 * (first + r))
        for q in range(group * r, group * (r + 1)):
            _weigh(own + batch.own_scores + batch.score_stride * q, batch.score_stride, prefix, mask)
    ahead, ahead_table = 0, 0
    if task + 1 < num_tasks and _is_first(batch, (task + 1) // kv_heads):
        other = load_integer(64, batch.units + 8 + UNIT_BYTES * ((task + 1) // kv_heads))
        ahead = layer.keys + 2 * TILE * size * ((task + 1) % kv_heads)
        ahead_table = batch.tables + 8 * batch.table_width * other
    _mix(model, layer, batch, own, table, sequence, first, rows, head, ahead, ahead_table)
    out_bytes = group * (size // 32) * row_bytes(model.body_kind)
    for r in range(rows):
        for q in range(group * r, group * (r + 1)):
            _scale(out + 4 * size * q, size, own + batch.own_scores + batch.score_stride * (q + 1) - 4)
        place = batch.attended + batch.attended_stride * (first + r) + head * out_bytes
        encode(model.body_kind, out + 4 * size * group * r, group * size // 32, place)


@native
def _is_first(batch: Record, unit: int) -> bool:
    """Whether a unit is its sequence's first, which finds keys and values in no cache."""
    place = batch.units + 8 + UNIT_BYTES * unit
    return load_integer(64, place + 8) == load_integer(64, batch.row_starts + 8 * load_integer(64, place))


@native
def _prefix(batch: Record, sequence: int, row: int) -> int:
    """Tokens from the sequence's first that a row sees without gaps; a tree row's ancestors come behind them."""
    within = row - load_integer(64, batch.row_starts + 8 * sequence)
    chain = load_integer(64, batch.chain_lens + 8 * sequence)
    return load_integer(64, batch.num_computed + 8 * sequence) + min(chain, within + 1)


@native
def _score(
    model: Record,
    layer: Record,
    batch: Record,
    own: int,
    table: int,
    sequence: int,
    first: int,
    rows: int,
    head: int,
) -> None:
    """The scores of all logical indices up to the last that a row of the unit sees."""
    size = model.head_size
    span = 0
    for row in range(first, first + rows):
        end, mask = _prefix(batch, sequence, row), load_integer(64, batch.tree_masks + 8 * row)
        while mask:
            mask >>= 1
            end += 1
        span = max(span, end)
    num_queries, num_tiles = rows * (model.num_heads // model.num_kv_heads), (span + TILE - 1) // TILE
    keys, ahead = layer.keys + 2 * TILE * size * head, 0
    if first == load_integer(64, batch.row_starts + 8 * sequence):
        ahead = layer.values + 2 * TILE * size * head
    for q in range(0, num_queries, model.max_queries):
        many = min(model.max_queries, num_queries - q)
        source, out = own + batch.own_queries + 4 * size * q, own + batch.own_scores + batch.score_stride * q
        tile = 0
        while tile < num_tiles:
            tiles = model.max_tiles if tile + model.max_tiles <= num_tiles else 1
            place, entry = out + 4 * TILE * tile, table + 8 * tile
            call_kernel_at(
                model.score_kernel,
                (many, tiles, source, keys, entry, model.tile_stride, size, place, batch.score_stride, ahead),
            )
            tile += tiles
        ahead = 0


@native
def _weigh(scores: int, stride: int, prefix: int, mask: int) -> None:
    """Turn a row of scores into weights e^(score - largest) of what it sees, in logical order.

    The visible tree nodes move down to stand behind the prefix. The last float of the row becomes 1 / sum.
    """
    count, node = prefix, 0
    while mask >> node:
        if (mask >> node) & 1:
            store_float(scores + 4 * count, load_float(scores + 4 * (prefix + node)))
            count += 1
        node += 1
    largest = broadcast(np.float32(-np.inf))
    for i in range(0, count, 16):
        largest = larger(largest, keep_first(load(scores + 4 * i), count - i, np.float32(-np.inf)))
    peak = broadcast(max_lanes(largest))
    total = broadcast(np.float32(0))
    for i in range(0, count, 16):
        weights = keep_first(exponential(load(scores + 4 * i) - peak), count - i, np.float32(0))
        store(scores + 4 * i, weights)
        total = total + weights
    store_float(scores + stride - 4, np.float32(1) / sum_lanes(total))


@native
def _mix(
    model: Record,
    layer: Record,
    batch: Record,
    own: int,
    table: int,
    sequence: int,
    first: int,
    rows: int,
    head: int,
    ahead: int,
    ahead_table: int,
) -> None:
    """The weighted sums of values: over what all rows of the unit see together, then over the rest of each."""
    size, group = model.head_size, model.num_heads // model.num_kv_heads
    values = layer.values + 2 * TILE * size * head
    weights, out = own + batch.own_scores, own + batch.own_floats
    for i in range(0, 4 * size * group * rows, 64):
        store(out + i, broadcast(np.float32(0)))
    common = _prefix(batch, sequence, first)
    _mix_run(model, batch, values, table, weights, out, rows * group, 0, common, 0, ahead, ahead_table)
    for r in range(rows):
        w, o = weights + batch.score_stride * group * r, out + 4 * size * group * r
        prefix, mask = _prefix(batch, sequence, first + r), load_integer(64, batch.tree_masks + 8 * (first + r))
        _mix_run(model, batch, values, table, w, o, group, common, prefix - common, common, 0, 0)
        place, node = prefix, 0
        while mask >> node:
            if (mask >> node) & 1:
                _mix_run(model, batch, values, table, w, o, group, prefix + node, 1, place, 0, 0)
                place += 1
            node += 1


@native
def _mix_run(
    model: Record,
    batch: Record,
    values: int,
    table: int,
    weights: int,
    out: int,
    num_queries: int,
    first: int,
    count: int,
    place: int,
    ahead: int,
    ahead_table: int,
) -> None:
    """Add `count` tokens from logical index `first` on; their weights begin at float `place` of each row of weights."""
    size = model.head_size
    for q in range(0, num_queries, model.max_queries):
        many = min(model.max_queries, num_queries - q)
        w, o = weights + batch.score_stride * q + 4 * place, out + 4 * size * q
        for d in range(0, size, model.mix_width):
            place_ahead = ahead + 2 * d if ahead != 0 and q == 0 else 0
            call_kernel_at(
                model.mix_kernel,
                (
                    many,
                    w,
                    batch.score_stride,
                    values + 2 * d,
                    table,
                    model.tile_stride,
                    size,
                    first,
                    count,
                    o + 4 * d,
                    place_ahead,
                    ahead_table,
                ),
            )


@native
def _scale(x: int, size: int, factor: int) -> None:
    """Multiply `size` floats by the float at `factor`."""
    scale = broadcast(load_float(factor))
    for i in range(0, 4 * size, 64):
        store(x + i, load(x + i) * scale)
