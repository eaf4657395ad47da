"""The innermost loops of attention: scores of tiles of keys, and weighted sums of values.

Keys of 16 consecutive slots form a tile [head_size, 16], so that a vector holds one dimension of 16 tokens and a score
is summed in its own lane; values of a tile are [16, head_size], and each output dimension is summed token by token. A
score or an output therefore never depends on which slot, tile or batch its tokens stand in.

A cache is read in short pieces, tile by tile, which the processor's own prefetching does not foresee: while keys are
scored their values are asked of memory, and while values are summed the keys of the next task.
"""

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
    prefetch_at,
    splat,
    store_at,
    vector_of,
)
from target.native.isa import AVX512
from target.native.vectors import Lowered

TILE = 16
"""Slots whose keys are laid side by side."""
_TILE_SHIFT = 4
_MOST_QUERIES = 6


def queries_at_once(isa: int) -> int:
    """Query vectors that share the loads of keys and values: as many as there are registers for their sums."""
    return _MOST_QUERIES if isa == AVX512 else 3


def tiles_at_once(isa: int) -> int:
    """Tiles of keys scored side by side where there are so many left."""
    return 4 if isa == AVX512 else 1


def _int(value: int) -> Any:
    return ir.Constant(I64, value)


@intrinsic
def _score_tiles(
    typingctx: Any,
    isa: Any,
    num_queries: Any,
    num_tiles: Any,
    queries: Any,
    keys: Any,
    table: Any,
    tile_stride: Any,
    head_size: Any,
    out: Any,
    out_stride: Any,
    ahead: Any,
) -> Lowered:
    """See `score_kernel`."""
    number = isa.literal_value

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        done = b.append_basic_block("done")
        has_ahead = b.zext(b.icmp_unsigned("!=", args[10], _int(0)), I64)
        switch = b.switch(b.add(b.mul(b.add(b.mul(args[1], _int(8)), args[2]), _int(2)), has_ahead), done)
        for tiles in sorted({1, tiles_at_once(number)}):
            for many in range(1, queries_at_once(number) + 1):
                for asks in (0, 1):
                    block = b.append_basic_block("case")
                    switch.add_case((many * 8 + tiles) * 2 + asks, block)
                    b.position_at_end(block)
                    kernel = _ScoreKernel(many, tiles, bool(asks))
                    call_kernel(b, f"score.{number}.{many}.{tiles}.{asks}", args[3:], kernel.emit)
                    b.branch(done)
        b.position_at_end(done)
        return context.get_dummy_value()

    return types.void(isa, *[types.int64] * 10), emit


def score_kernel(isa: int) -> Any:
    """A C function: out[q, 16 t + i] = queries[q] . keys of token i of tile t, summed over dimensions in order.

    Its arguments: number of queries, number of tiles (1 or `tiles_at_once`), then addresses and strides in bytes.
    `table` holds the tiles' numbers. `ahead`, unless 0, is where the tiles' values are: they are prefetched.
    """

    def score(
        num_queries: int,
        num_tiles: int,
        queries: int,
        keys: int,
        table: int,
        tile_stride: int,
        head_size: int,
        out: int,
        out_stride: int,
        ahead: int,
    ) -> None:
        _score_tiles(isa, num_queries, num_tiles, queries, keys, table, tile_stride, head_size, out, out_stride, ahead)

    return c_function(score, 10)


class _ScoreKernel:
    def __init__(self, num_queries: int, num_tiles: int, has_ahead: bool) -> None:
        self.num_queries, self.num_tiles, self.has_ahead = num_queries, num_tiles, has_ahead

    def emit(
        self,
        b: Any,
        queries: Any,
        keys: Any,
        table: Any,
        tile_stride: Any,
        head_size: Any,
        out: Any,
        out_stride: Any,
        ahead: Any,
    ) -> None:
        sums = Accumulators(b, self.num_queries * self.num_tiles, LANES)
        places = [b.mul(load_at(b, table, 8 * t, I64, 8), tile_stride) for t in range(self.num_tiles)]
        rows = [b.add(queries, b.mul(head_size, _int(4 * q))) for q in range(self.num_queries)]
        with loop(b, b.lshr(head_size, _int(1))) as pair:
            line = b.mul(pair, _int(4 * TILE))
            for place in places if self.has_ahead else []:
                prefetch_at(b, b.add(b.add(ahead, place), line), 0)
            for half in range(2):
                values = [splat(b, load_at(b, b.add(row, b.mul(pair, _int(8))), 4 * half, F32, 4)) for row in rows]
                for t, place in enumerate(places):
                    column = b.add(b.add(keys, place), line)
                    key = b.fpext(load_at(b, column, 2 * TILE * half, vector_of(F16), 32), vector_of(F32))
                    for q, value in enumerate(values):
                        i = q * self.num_tiles + t
                        sums.set(b, i, fma(b, key, value, sums.get(b, i)))
        for q in range(self.num_queries):
            for t in range(self.num_tiles):
                store_at(b, sums.get(b, q * self.num_tiles + t), b.add(out, b.mul(out_stride, _int(q))), 64 * t, 4)


@intrinsic
def _mix_tokens(
    typingctx: Any,
    isa: Any,
    width: Any,
    num_queries: Any,
    weights: Any,
    weight_stride: Any,
    values: Any,
    table: Any,
    tile_stride: Any,
    head_size: Any,
    first: Any,
    count: Any,
    out: Any,
    ahead: Any,
    ahead_table: Any,
) -> Lowered:
    """See `mix_kernel`."""
    number, dimensions = isa.literal_value, width.literal_value

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        done = b.append_basic_block("done")
        has_ahead = b.zext(b.icmp_unsigned("!=", args[12], _int(0)), I64)
        switch = b.switch(b.add(b.mul(args[2], _int(2)), has_ahead), done)
        for many in range(1, queries_at_once(number) + 1):
            for asks in (0, 1):
                block = b.append_basic_block("case")
                switch.add_case(many * 2 + asks, block)
                b.position_at_end(block)
                kernel = _MixKernel(many, dimensions, bool(asks))
                call_kernel(b, f"mix.{number}.{dimensions}.{many}.{asks}", args[3:], kernel.emit)
                b.branch(done)
        b.position_at_end(done)
        return context.get_dummy_value()

    return types.void(isa, width, *[types.int64] * 12), emit


def mix_width(isa: int, head_size: int) -> int:
    """Dimensions of a value that one call of the mix kernel sums."""
    return 64 if isa == AVX512 and head_size % 64 == 0 else 32


def mix_kernel(isa: int, width: int) -> Any:
    """A C function: out[q, :width] += weights[q, i] * values of logical index first + i, for i in [0, count) in order.

    Its arguments: number of queries, then addresses, strides in bytes and counts. Rows of `out` are `head_size` floats
    apart. `ahead`, unless 0, is where keys of the next task are, at the tiles of `ahead_table`: they are prefetched.
    """

    def mix(
        num_queries: int,
        weights: int,
        weight_stride: int,
        values: int,
        table: int,
        tile_stride: int,
        head_size: int,
        first: int,
        count: int,
        out: int,
        ahead: int,
        ahead_table: int,
    ) -> None:
        _mix_tokens(
            isa,
            width,
            num_queries,
            weights,
            weight_stride,
            values,
            table,
            tile_stride,
            head_size,
            first,
            count,
            out,
            ahead,
            ahead_table,
        )

    return c_function(mix, 12)


class _MixKernel:
    def __init__(self, num_queries: int, width: int, has_ahead: bool) -> None:
        self.num_queries, self.vectors, self.has_ahead = num_queries, width // LANES, has_ahead

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
        ahead: Any,
        ahead_table: Any,
    ) -> None:
        number = self.num_queries * self.vectors
        sums = Accumulators(b, number, LANES)
        rows = [b.add(out, b.mul(head_size, _int(4 * q))) for q in range(self.num_queries)]
        for i in range(number):
            sums.set(b, i, load_at(b, rows[i // self.vectors], 64 * (i % self.vectors), vector_of(F32), 4))
        streams = [b.add(weights, b.mul(weight_stride, _int(q))) for q in range(self.num_queries)]
        with loop(b, count) as i:
            token = b.add(first, i)
            entry = b.shl(b.lshr(token, _int(_TILE_SHIFT)), _int(3))
            place = b.mul(b.and_(token, _int(TILE - 1)), b.mul(head_size, _int(2)))
            tile = b.mul(load_at(b, b.add(table, entry), 0, I64, 8), tile_stride)
            value_row = b.add(b.add(values, tile), place)
            if self.has_ahead:
                other = b.mul(load_at(b, b.add(ahead_table, entry), 0, I64, 8), tile_stride)
                for line in range(0, 2 * LANES * self.vectors, 64):
                    prefetch_at(b, b.add(b.add(ahead, other), place), line)
            factors = [splat(b, load_at(b, b.add(stream, b.mul(i, _int(4))), 0, F32, 4)) for stream in streams]
            for v in range(self.vectors):
                value = b.fpext(load_at(b, value_row, 32 * v, vector_of(F16), 32), vector_of(F32))
                for q, factor in enumerate(factors):
                    k = q * self.vectors + v
                    sums.set(b, k, fma(b, value, factor, sums.get(b, k)))
        for i in range(number):
            store_at(b, sums.get(b, i), rows[i // self.vectors], 64 * (i % self.vectors), 4)
