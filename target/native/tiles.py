"""The product of a panel of 16 output channels and a tile of a few rows: the innermost loops.

Weights and activations come in groups of 32 along the inputs. Within a group, products are summed as integers, exactly;
the group's sum becomes a float, is multiplied by the scales of weights and activations, and is added to the result of
the groups before it. So a result is bitwise the same for every instruction set and every number of rows in the tile.

Bytes of one group of a panel (16 channels, lane c) and of one row's activations:

    Q4      16 scales f16 | 16 minima f16 | 4 x 16 lanes x 4 bytes     32 int8  | scale f32 | scale * sum f32
            byte b of lane c in vector j: inputs 4j + b (low nibble) and 16 + 4j + b (high nibble)
    Q8      16 scales f16 | 16 x 16 lanes x 2 int8                     32 int16 | scale f32
            vector j holds inputs 2j and 2j + 1
    FLOAT   32 x 16 lanes f32, one vector an input                     32 f32

Q4 is GGUF's Q4_1 (weight = scale * nibble + minimum), Q8 its Q8_0 (weight = scale * integer).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from target.native.compiling import c_function, intrinsic
from target.native.emit import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    Accumulators,
    call,
    call_kernel,
    const,
    fma,
    load_at,
    loop,
    prefetch_at,
    splat,
    store_at,
    vector_of,
)
from target.native.isa import AVX2, AVX512
from target.native.vectors import Lowered

Q4, Q8, FLOAT = 0, 1, 2
GROUP = 32
"""Inputs that share a scale."""
PANEL_BYTES = {Q4: 64 + 256, Q8: 32 + 512, FLOAT: 2048}
"""Of one group of a panel."""
ROW_BYTES = {Q4: 40, Q8: 68, FLOAT: 128}
"""Of one group of a row's activations."""
MAX_TILE_ROWS = 8
PREFETCH_BYTES = 8192
"""How far ahead of the products weights are asked of memory. Without it, arithmetic and memory take turns: 8 rows take
30 % longer."""


def tile_rows(isa: int) -> int:
    """Rows whose sums fit the registers of an instruction set."""
    return MAX_TILE_ROWS if isa == AVX512 else 4


@intrinsic
def _multiply_tile(
    typingctx: Any,
    kind: Any,
    isa: Any,
    rows: Any,
    panel: Any,
    groups: Any,
    x: Any,
    x_stride: Any,
    out: Any,
    stride: Any,
) -> Lowered:
    """See `product_kernel`; `kind` and `isa` are constants."""
    kind_number, isa_number = kind.literal_value, isa.literal_value
    emit_group = {Q4: _q4_group, Q8: _q8_group, FLOAT: _float_group}[kind_number]

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        done = b.append_basic_block("done")
        switch = b.switch(args[2], done)
        for num_rows in range(1, tile_rows(isa_number) + 1):
            block = b.append_basic_block("rows")
            switch.add_case(num_rows, block)
            b.position_at_end(block)
            tile = _Tile(kind_number, isa_number, num_rows, emit_group)
            call_kernel(b, f"tile.{kind_number}.{isa_number}.{num_rows}", args[3:], tile.emit)
            b.branch(done)
        b.position_at_end(done)
        return context.get_dummy_value()

    return types.void(kind, isa, *[types.int64] * 7), emit


def product_kernel(kind: int, isa: int) -> Any:
    """The compiled product of a panel of weights of `kind` and a few rows, with the instructions of `isa`.

    A C function (its `address` is what the step calls) of rows, panel, groups, x, x_stride, out, out_stride:
    out[r, :16] = x[r] @ panel for `rows` rows, at most `tile_rows(isa)`. Addresses and strides are in bytes.
    """

    def product(rows: int, panel: int, groups: int, x: int, x_stride: int, out: int, out_stride: int) -> None:
        _multiply_tile(kind, isa, rows, panel, groups, x, x_stride, out, out_stride)

    return c_function(product, 7)


class _Tile:
    """One kernel: a kind of weights, an instruction set, a number of rows."""

    def __init__(self, kind: int, isa: int, rows: int, emit_group: Callable[..., None]) -> None:
        self.kind, self.isa, self.rows = kind, isa, rows
        self.lanes = LANES if isa == AVX512 else LANES // 2
        self._emit_group = emit_group

    def emit(self, b: Any, panel: Any, groups: Any, x: Any, x_stride: Any, out: Any, out_stride: Any) -> None:
        """The whole loop over groups, for the panel's 16 lanes in one or two parts of a register each."""
        parts = LANES // self.lanes
        sums = [Accumulators(b, self.rows, self.lanes) for _ in range(parts)]
        rows = [b.add(x, b.mul(x_stride, _int(r))) for r in range(self.rows)]
        with loop(b, groups) as g:
            weights = b.add(panel, b.mul(g, _int(PANEL_BYTES[self.kind])))
            for line in range(0, PANEL_BYTES[self.kind], 64):
                prefetch_at(b, weights, PREFETCH_BYTES + line)
            activations = [b.add(row, b.mul(g, _int(ROW_BYTES[self.kind]))) for row in rows]
            for part in range(parts):
                self._emit_group(b, self, weights, activations, part * self.lanes, sums[part])
        for part in range(parts):
            for r in range(self.rows):
                address = b.add(out, b.mul(out_stride, _int(r)))
                store_at(b, sums[part].get(b, r), address, part * self.lanes * 4, 4)


def _int(value: int) -> Any:
    return ir.Constant(I64, value)


def _q4_group(b: Any, tile: _Tile, weights: Any, rows: list[Any], lane: int, sums: Accumulators) -> None:
    lanes = tile.lanes
    halves = vector_of(F16, lanes)
    scales = b.fpext(load_at(b, weights, 2 * lane, halves, 2 * lanes), vector_of(F32, lanes))
    minima = b.fpext(load_at(b, weights, 32 + 2 * lane, halves, 2 * lanes), vector_of(F32, lanes))
    integers: list[Any] = [None] * tile.rows
    for j in range(4):
        bytes_ = load_at(b, weights, 64 + 64 * j + 4 * lane, vector_of(I32, lanes), 4 * lanes)
        for high in range(2):
            nibbles = b.and_(b.lshr(bytes_, const(I32, 4, lanes)) if high else bytes_, const(I32, 0x0F0F0F0F, lanes))
            for r, row in enumerate(rows):
                four = splat(b, load_at(b, row, 16 * high + 4 * j, I32, 4), lanes)
                integers[r] = _add_byte_products(b, tile.isa, integers[r], nibbles, four, lanes)
    for r, row in enumerate(rows):
        exact = integers[r] if tile.isa != AVX2 else _pairwise(b, integers[r], const(I16, 1, 2 * lanes), lanes)
        scale = splat(b, load_at(b, row, 32, F32, 4), lanes)
        scaled_sum = splat(b, load_at(b, row, 36, F32, 4), lanes)
        total = fma(b, b.sitofp(exact, vector_of(F32, lanes)), b.fmul(scales, scale), sums.get(b, r))
        sums.set(b, r, fma(b, minima, scaled_sum, total))


def _q8_group(b: Any, tile: _Tile, weights: Any, rows: list[Any], lane: int, sums: Accumulators) -> None:
    lanes = tile.lanes
    scales = b.fpext(load_at(b, weights, 2 * lane, vector_of(F16, lanes), 2 * lanes), vector_of(F32, lanes))
    integers: list[Any] = [None] * tile.rows
    for j in range(GROUP // 2):
        bytes_ = load_at(b, weights, 32 + 32 * j + 2 * lane, vector_of(I8, 2 * lanes), 2 * lanes)
        pairs = b.sext(bytes_, vector_of(I16, 2 * lanes))
        for r, row in enumerate(rows):
            two = b.bitcast(splat(b, load_at(b, row, 4 * j, I32, 4), lanes), vector_of(I16, 2 * lanes))
            integers[r] = _add_word_products(b, tile.isa, integers[r], pairs, two, lanes)
    for r, row in enumerate(rows):
        scale = splat(b, load_at(b, row, 64, F32, 4), lanes)
        exact = b.sitofp(integers[r], vector_of(F32, lanes))
        sums.set(b, r, fma(b, exact, b.fmul(scales, scale), sums.get(b, r)))


def _float_group(b: Any, tile: _Tile, weights: Any, rows: list[Any], lane: int, sums: Accumulators) -> None:
    for k in range(GROUP):
        column = load_at(b, weights, 64 * k + 4 * lane, vector_of(F32, tile.lanes), 4 * tile.lanes)
        for r, row in enumerate(rows):
            value = splat(b, load_at(b, row, 4 * k, F32, 4), tile.lanes)
            sums.set(b, r, fma(b, column, value, sums.get(b, r)))


def _add_byte_products(b: Any, isa: int, total: Any, nibbles: Any, signed: Any, lanes: int) -> Any:
    """Add the products of 4 unsigned and 4 signed bytes a lane.

    Without VNNI the sums are pairs of int16: 8 times 2 * 15 * 127 is below 2^15.
    """
    bytes_ = vector_of(I8, 4 * lanes)
    operands = [b.bitcast(nibbles, bytes_), b.bitcast(signed, bytes_)]
    if isa != AVX2:
        start = const(I32, 0, lanes) if total is None else total
        return call(b, f"llvm.x86.avx512.vpdpbusd.{32 * lanes}", start.type, [start, *operands])
    products = call(b, "llvm.x86.avx2.pmadd.ub.sw", vector_of(I16, 2 * lanes), operands)
    return products if total is None else b.add(total, products)


def _add_word_products(b: Any, isa: int, total: Any, weights: Any, activations: Any, lanes: int) -> Any:
    """Add the products of 2 and 2 signed int16 a lane."""
    if isa != AVX2:
        start = const(I32, 0, lanes) if total is None else total
        return call(b, f"llvm.x86.avx512.vpdpwssd.{32 * lanes}", start.type, [start, weights, activations])
    products = _pairwise(b, weights, activations, lanes)
    return products if total is None else b.add(total, products)


def _pairwise(b: Any, x: Any, y: Any, lanes: int) -> Any:
    """The products of two int16 vectors, neighbours summed."""
    return call(b, "llvm.x86.avx2.pmadd.wd", vector_of(I32, lanes), [x, y])
