"""The innermost loops of attention: scores of tiles of keys, and weighted sums of values."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from target.native.compiling import c_function, intrinsic
from target.native.emit import (
    F16,
    F32,
    I64,
    LANES,
    Accumulators,
    call_kernel,
    fma,
    load_at,
    loop,
    splat,
    store_at,
    vector_of,
)
from target.native.vectors import Lowered

TILE = 16
"""Slots whose keys are laid side by side."""
TILE_SHIFT = 4
MAX_QUERIES = 4
TILES_AT_ONCE = 4


def _int(value: int) -> Any:
    return ir.Constant(I64, value)


@intrinsic
def _score_tiles(
    typingctx: Any,
    num_queries: Any,
    num_tiles: Any,
    queries: Any,
    keys: Any,
    table: Any,
    tile_stride: Any,
    head_size: Any,
    out: Any,
    out_stride: Any,
) -> Lowered:
    """out[q, 16 t + i] = queries[q] . keys of token i of tile t: 1 or `TILES_AT_ONCE` tiles, up to `MAX_QUERIES` q."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        done = b.append_basic_block("done")
        switch = b.switch(b.add(b.mul(args[0], _int(16)), args[1]), done)
        for queries_case in range(1, MAX_QUERIES + 1):
            for tiles_case in (1, TILES_AT_ONCE):
                block = b.append_basic_block("case")
                switch.add_case(queries_case * 16 + tiles_case, block)
                b.position_at_end(block)
                kernel = _ScoreKernel(queries_case, tiles_case)
                call_kernel(b, f"score.{queries_case}.{tiles_case}", args[2:], kernel.emit)
                b.branch(done)
        b.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), emit


class _ScoreKernel:
    def __init__(self, num_queries: int, num_tiles: int) -> None:
        self.num_queries, self.num_tiles = num_queries, num_tiles

    def emit(
        self, b: Any, queries: Any, keys: Any, table: Any, tile_stride: Any, head_size: Any, out: Any, out_stride: Any
    ) -> None:
        sums = Accumulators(b, self.num_queries * self.num_tiles, LANES)
        tiles = [b.add(keys, b.mul(load_at(b, table, 8 * t, I64, 8), tile_stride)) for t in range(self.num_tiles)]
        rows = [b.add(queries, b.mul(head_size, _int(4 * q))) for q in range(self.num_queries)]
        with loop(b, head_size) as d:
            column, place = b.mul(d, _int(2 * TILE)), b.mul(d, _int(4))
            values = [splat(b, load_at(b, b.add(row, place), 0, F32, 4)) for row in rows]
            for t, tile in enumerate(tiles):
                key = b.fpext(load_at(b, b.add(tile, column), 0, vector_of(F16), 32), vector_of(F32))
                for q, value in enumerate(values):
                    i = q * self.num_tiles + t
                    sums.set(b, i, fma(b, key, value, sums.get(b, i)))
        for q in range(self.num_queries):
            for t in range(self.num_tiles):
                store_at(b, sums.get(b, q * self.num_tiles + t), b.add(out, b.mul(out_stride, _int(q))), 64 * t, 4)


@intrinsic
def _mix_tokens(
    typingctx: Any,
    num_queries: Any,
    width: Any,
    weights: Any,
    weight_stride: Any,
    values: Any,
    table: Any,
    tile_stride: Any,
    head_size: Any,
    first: Any,
    count: Any,
    out: Any,
) -> Lowered:
    """out[q, :width] += weights[q, i] * values of logical index `first` + i, for i in [0, count), one after the other.

    `width` is 32 or 64; rows of `out` are `head_size` floats apart, those of `weights` `weight_stride` bytes.
    """

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        done = b.append_basic_block("done")
        switch = b.switch(b.add(b.mul(args[0], _int(128)), args[1]), done)
        for queries_case in range(1, MAX_QUERIES + 1):
            for width_case in (32, 64):
                block = b.append_basic_block("case")
                switch.add_case(queries_case * 128 + width_case, block)
                b.position_at_end(block)
                kernel = _MixKernel(queries_case, width_case)
                call_kernel(b, f"mix.{queries_case}.{width_case}", args[2:], kernel.emit)
                b.branch(done)
        b.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 11), emit


class _MixKernel:
    def __init__(self, num_queries: int, width: int) -> None:
        self.num_queries, self.vectors = num_queries, width // LANES

    def emit(
        self,
        b: Any,
        weights: Any,
        weight_stride: Any,
        values: Any,
        table: Any,
        tile_stride: Any,
        head_size: Any,
        first: Any,
        count: Any,
        out: Any,
    ) -> None:
        sums = Accumulators(b, self.num_queries * self.vectors, LANES)
        rows = [b.add(out, b.mul(head_size, _int(4 * q))) for q in range(self.num_queries)]
        for i in range(self.num_queries * self.vectors):
            sums.set(b, i, load_at(b, rows[i // self.vectors], 64 * (i % self.vectors), vector_of(F32), 4))
        streams = [b.add(weights, b.mul(weight_stride, _int(q))) for q in range(self.num_queries)]
        with loop(b, count) as i:
            token = b.add(first, i)
            entry = b.add(table, b.shl(b.lshr(token, _int(TILE_SHIFT)), _int(3)))
            tile = b.add(values, b.mul(load_at(b, entry, 0, I64, 8), tile_stride))
            value_row = b.add(tile, b.mul(b.and_(token, _int(TILE - 1)), b.mul(head_size, _int(2))))
            place = b.mul(i, _int(4))
            factors = [splat(b, load_at(b, b.add(stream, place), 0, F32, 4)) for stream in streams]
            for v in range(self.vectors):
                value = b.fpext(load_at(b, value_row, 32 * v, vector_of(F16), 32), vector_of(F32))
                for q, factor in enumerate(factors):
                    k = q * self.vectors + v
                    sums.set(b, k, fma(b, value, factor, sums.get(b, k)))
        for i in range(self.num_queries * self.vectors):
            store_at(b, sums.get(b, i), rows[i // self.vectors], 64 * (i % self.vectors), 4)


def score_kernel() -> Any:
    """`_score_tiles` as a C function of its nine arguments."""

    def score(
        num_queries: int,
        num_tiles: int,
        queries: int,
        keys: int,
        table: int,
        stride: int,
        size: int,
        out: int,
        out_stride: int,
    ) -> None:
        _score_tiles(num_queries, num_tiles, queries, keys, table, stride, size, out, out_stride)

    return c_function(score, 9)


def mix_kernel() -> Any:
    """`_mix_tokens` as a C function of its eleven arguments."""

    def mix(
        num_queries: int,
        width: int,
        weights: int,
        weight_stride: int,
        values: int,
        table: int,
        tile_stride: int,
        head_size: int,
        first: int,
        count: int,
        out: int,
    ) -> None:
        _mix_tokens(
            num_queries, width, weights, weight_stride, values, table, tile_stride, head_size, first, count, out
        )

    return c_function(mix, 11)
