"""Attention of one row over the paged cache, in the row's own logical order.

Keys of 16 consecutive slots form a tile [head_size, 16], so that a vector holds one dimension of 16 tokens and a score
is summed in its own lane; values of a tile are [16, head_size], and each output dimension is summed token by token. A
score or an output therefore never depends on which slot, tile or batch its tokens stand in.
"""

from __future__ import annotations

import numpy as np

from target.native.attention_tiles import MAX_QUERIES, TILE, TILES_AT_ONCE
from target.native.calls import call_kernel_at
from target.native.compiling import native
from target.native.vectors import (
    broadcast,
    exponential,
    keep_first,
    larger,
    load,
    load_float,
    max_lanes,
    store,
    store_float,
    sum_lanes,
)

_HALF_BYTES = 2


@native
def attend(
    score_kernel: int,
    mix_kernel: int,
    queries: int,
    num_queries: int,
    head_size: int,
    keys: int,
    values: int,
    table: int,
    tile_stride: int,
    prefix: int,
    mask: int,
    scores: int,
    score_stride: int,
    wide: bool,
    out: int,
) -> None:
    """The attention of the query heads that share one key head: out[q] = softmax(queries[q] keys) values.

    `queries`, `out`: [num_queries, head_size] float32, the queries scaled. `keys`, `values`: this layer's and key
    head's place in tile 0; the sequence's j-th tile is `table[j] * tile_stride` bytes on. The row sees the logical
    indices [0, prefix) and, for each bit i of `mask`, prefix + i. `scores`: room for num_queries rows of
    `score_stride` bytes. `wide`: whether there are registers for several tiles at once. All else are addresses.
    """
    span = prefix
    while mask >> (span - prefix):
        span += 1
    _score(score_kernel, queries, num_queries, head_size, keys, table, tile_stride, span, scores, score_stride, wide)
    count = prefix
    for q in range(num_queries):
        count = _compact(scores + q * score_stride, prefix, mask)
    _mix(
        mix_kernel,
        num_queries,
        head_size,
        values,
        table,
        tile_stride,
        prefix,
        mask,
        count,
        scores,
        score_stride,
        wide,
        out,
    )


@native
def _score(
    kernel: int,
    queries: int,
    num_queries: int,
    head_size: int,
    keys: int,
    table: int,
    tile_stride: int,
    span: int,
    scores: int,
    score_stride: int,
    wide: bool,
) -> None:
    """The scores of the first `span` logical indices."""
    num_tiles = (span + TILE - 1) // TILE
    for first in range(0, num_queries, MAX_QUERIES):
        number = min(MAX_QUERIES, num_queries - first)
        source, out = queries + 4 * first * head_size, scores + first * score_stride
        tile = 0
        while tile < num_tiles:
            tiles = TILES_AT_ONCE if wide and tile + TILES_AT_ONCE <= num_tiles else 1
            place = out + 4 * TILE * tile
            columns = table + 8 * tile
            call_kernel_at(kernel, (number, tiles, source, keys, columns, tile_stride, head_size, place, score_stride))
            tile += tiles


@native
def _compact(scores: int, prefix: int, mask: int) -> int:
    """Bring the visible scores side by side, in logical order; returns how many they are."""
    count, rest, node = prefix, mask, 0
    while rest:
        if rest & 1:
            store_float(scores + 4 * count, load_float(scores + 4 * (prefix + node)))
            count += 1
        rest >>= 1
        node += 1
    return count


@native
def _softmax(scores: int, count: int) -> float:
    """Replace the scores by e^(score - largest); returns their sum."""
    largest = broadcast(np.float32(-np.inf))
    for i in range(0, count, 16):
        largest = larger(largest, keep_first(load(scores + 4 * i), count - i, np.float32(-np.inf)))
    peak = broadcast(max_lanes(largest))
    total = broadcast(np.float32(0))
    for i in range(0, count, 16):
        weights = keep_first(exponential(load(scores + 4 * i) - peak), count - i, np.float32(0))
        store(scores + 4 * i, weights)
        total = total + weights
    return sum_lanes(total)


@native
def _mix(
    kernel: int,
    num_queries: int,
    head_size: int,
    values: int,
    table: int,
    tile_stride: int,
    prefix: int,
    mask: int,
    count: int,
    scores: int,
    score_stride: int,
    wide: bool,
    out: int,
) -> None:
    """The values of the visible tokens, weighted by the softmax of their scores."""
    for q in range(num_queries):
        total = _softmax(scores + q * score_stride, count)
        store_float(scores + q * score_stride + score_stride - 4, np.float32(1) / total)
    for q in range(num_queries):
        for i in range(0, 4 * head_size, 64):
            store(out + 4 * q * head_size + i, broadcast(np.float32(0)))
    width = 64 if wide and head_size % 64 == 0 else 32
    for first in range(0, num_queries, MAX_QUERIES):
        number = min(MAX_QUERIES, num_queries - first)
        weights = scores + first * score_stride
        for d in range(0, head_size, width):
            place, source = out + 4 * (first * head_size + d), values + _HALF_BYTES * d
            call_kernel_at(
                kernel,
                (number, width, weights, score_stride, source, table, tile_stride, head_size, 0, prefix, place),
            )
            weight, node = weights + 4 * prefix, 0
            while mask >> node:
                if (mask >> node) & 1:
                    token = prefix + node
                    call_kernel_at(
                        kernel,
                        (number, width, weight, score_stride, source, table, tile_stride, head_size, token, 1, place),
                    )
                    weight += 4
                node += 1
    for q in range(num_queries):
        scale = broadcast(load_float(scores + q * score_stride + score_stride - 4))
        for i in range(4 * q * head_size, 4 * (q + 1) * head_size, 64):
            store(out + i, load(out + i) * scale)
