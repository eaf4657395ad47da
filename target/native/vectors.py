"""Vectors of 16 floats inside compiled functions, and the memory they are loaded from.

A vector is one AVX-512 register or two of AVX; LLVM splits it. Every operation acts on each lane alone and rounds as
IEEE 754 says, and the one reduction has a fixed order, so results are bitwise the same on every processor. Addresses
are plain integers, in bytes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.datamodel import PrimitiveModel
from numba.extending import lower_builtin, register_model, type_callable

from target.native.compiling import intrinsic
from target.native.emit import F16, F32, I8, I16, I32, I64, LANES, call, const, fma, load_at, splat, store_at, vector_of

Lowered = tuple[Any, Callable[..., Any]]
"""What an intrinsic's function returns: its signature, and what emits its instructions."""


class VectorType(types.Type):  # type: ignore[misc]
    """Sixteen float32."""

    def __init__(self) -> None:
        super().__init__(name="f32x16")


F32x16 = VectorType()
_TYPE = vector_of(F32)


@register_model(VectorType)
class _VectorModel(PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, _TYPE)


def _define_operator(python_operator: Callable[..., Any], instruction: str) -> None:
    @type_callable(python_operator)
    def typer(context: Any) -> Callable[..., Any]:
        return lambda a, b: F32x16 if a is F32x16 and b is F32x16 else None

    @lower_builtin(python_operator, F32x16, F32x16)
    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return getattr(builder, instruction)(*args)


for _operator, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _define_operator(_operator, _instruction)


@intrinsic
def broadcast(typingctx: Any, value: Any) -> Lowered:
    """A float32 in all lanes."""
    return F32x16(types.float32), lambda c, b, s, args: splat(b, args[0])


@intrinsic
def load(typingctx: Any, address: Any) -> Lowered:
    """Sixteen float32 at `address`."""
    return F32x16(types.int64), lambda c, b, s, args: load_at(b, args[0], 0, _TYPE, 4)


@intrinsic
def load_bf16(typingctx: Any, address: Any) -> Lowered:
    """Sixteen bfloat16 at `address`, as float32: they are its upper halves."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        bits = b.zext(load_at(b, args[0], 0, vector_of(I16), 2), vector_of(I32))
        return b.bitcast(b.shl(bits, const(I32, 16)), _TYPE)

    return F32x16(types.int64), emit


@intrinsic
def store(typingctx: Any, address: Any, vector: Any) -> Lowered:
    """Write sixteen float32."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        store_at(b, args[1], args[0], 0, 4)
        return context.get_dummy_value()

    return types.void(types.int64, F32x16), emit


@intrinsic
def store_f16(typingctx: Any, address: Any, vector: Any) -> Lowered:
    """Write sixteen lanes as float16, rounded to nearest even."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        store_at(b, b.fptrunc(args[1], vector_of(F16)), args[0], 0, 2)
        return context.get_dummy_value()

    return types.void(types.int64, F32x16), emit


@intrinsic
def scatter_f16(typingctx: Any, address: Any, stride: Any, vector: Any) -> Lowered:
    """Write lane i as float16 at `address + i * stride`; `stride` is a constant."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        halves = b.fptrunc(args[2], vector_of(F16))
        for lane in range(LANES):
            store_at(b, b.extract_element(halves, ir.Constant(I32, lane)), args[0], lane * stride.literal_value, 2)
        return context.get_dummy_value()

    return types.void(types.int64, stride, F32x16), emit


@intrinsic
def multiply_add(typingctx: Any, a: Any, b: Any, c: Any) -> Lowered:
    """a * b + c, rounded once."""
    return F32x16(F32x16, F32x16, F32x16), lambda ctx, builder, s, args: fma(builder, *args)


@intrinsic
def larger(typingctx: Any, a: Any, b: Any) -> Lowered:
    """The larger of each pair of lanes."""
    return F32x16(F32x16, F32x16), lambda c, b, s, args: b.select(b.fcmp_ordered(">", *args), *args)


@intrinsic
def magnitude(typingctx: Any, a: Any) -> Lowered:
    """The absolute value of each lane."""
    return F32x16(F32x16), lambda c, b, s, args: call(b, "llvm.fabs.v16f32", _TYPE, args)


@intrinsic
def keep_first(typingctx: Any, vector: Any, count: Any, fill: Any) -> Lowered:
    """`vector` with `fill` in the lanes from `count` on."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        lanes = ir.Constant(vector_of(I32), list(range(LANES)))
        kept = b.icmp_signed("<", lanes, splat(b, b.trunc(args[1], I32)))
        return b.select(kept, args[0], splat(b, args[2]))

    return F32x16(F32x16, types.int64, types.float32), emit


def _fold(b: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """The lanes combined in a fixed tree: halves first."""
    width = LANES
    while width > 1:
        width //= 2
        lower, upper = (
            b.shuffle_vector(vector, vector, ir.Constant(vector_of(I32, width), list(range(at, at + width))))
            for at in (0, width)
        )
        vector = combine(lower, upper)
    return b.extract_element(vector, ir.Constant(I32, 0))


@intrinsic
def sum_lanes(typingctx: Any, vector: Any) -> Lowered:
    """The sum of all lanes, in a fixed order."""
    return types.float32(F32x16), lambda c, b, s, args: _fold(b, args[0], b.fadd)


@intrinsic
def max_lanes(typingctx: Any, vector: Any) -> Lowered:
    """The largest lane."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return _fold(b, args[0], lambda x, y: b.select(b.fcmp_ordered(">", x, y), x, y))

    return types.float32(F32x16), emit


@intrinsic
def exponential(typingctx: Any, vector: Any) -> Lowered:
    """e to the power of each lane, to about one unit in the last place; lanes are clamped to [-87, 88]."""
    return F32x16(F32x16), lambda c, b, s, args: _exponential(b, args[0])


def _exponential(b: Any, x: Any) -> Any:
    """x = n ln 2 + r with |r| <= ln 2 / 2; e^r by its Taylor series, 2^n by the exponent's bits."""
    low, high = const(F32, -87.0), const(F32, 88.0)
    x = b.select(b.fcmp_ordered(">", x, low), x, low)
    x = b.select(b.fcmp_ordered("<", x, high), x, high)
    n = call(b, "llvm.rint.v16f32", _TYPE, [b.fmul(x, const(F32, 1.4426950408889634))])
    r = fma(b, n, const(F32, -0.693145751953125), x)
    r = fma(b, n, const(F32, -1.428606765330187e-06), r)
    series = const(F32, 1 / 5040)
    for factorial in (720, 120, 24, 6, 2, 1, 1):
        series = fma(b, series, r, const(F32, 1 / factorial))
    power = b.shl(b.add(b.fptosi(n, vector_of(I32)), const(I32, 127)), const(I32, 23))
    return b.fmul(series, b.bitcast(power, _TYPE))


@intrinsic
def store_rounded(typingctx: Any, bits: Any, address: Any, vector: Any) -> Lowered:
    """Write the lanes rounded to integers of 8 or 16 `bits`, and return their sum."""
    narrow = {8: I8, 16: I16}[bits.literal_value]

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        integers = b.fptosi(call(b, "llvm.rint.v16f32", _TYPE, [args[2]]), vector_of(I32))
        store_at(b, b.trunc(integers, vector_of(narrow)), args[1], 0, narrow.width // 8)
        return call(b, "llvm.vector.reduce.add.v16i32", I32, [integers])

    return types.int32(bits, types.int64, F32x16), emit


@intrinsic
def load_integer(typingctx: Any, bits: Any, address: Any) -> Lowered:
    """The signed integer of `bits` bits at `address`."""
    kind = ir.IntType(bits.literal_value)

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        value = load_at(b, args[1], 0, kind, kind.width // 8)
        return value if kind.width == 64 else b.sext(value, I64)

    return types.int64(bits, types.int64), emit


@intrinsic
def store_integer(typingctx: Any, address: Any, value: Any) -> Lowered:
    """Write an int64."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        store_at(b, args[1], args[0], 0, 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def load_float(typingctx: Any, address: Any) -> Lowered:
    """The float32 at `address`."""
    return types.float32(types.int64), lambda c, b, s, args: load_at(b, args[0], 0, F32, 4)


@intrinsic
def load_half(typingctx: Any, address: Any) -> Lowered:
    """The float16 at `address`, as float32."""
    return types.float32(types.int64), lambda c, b, s, args: b.fpext(load_at(b, args[0], 0, F16, 2), F32)


@intrinsic
def store_float(typingctx: Any, address: Any, value: Any) -> Lowered:
    """Write a float32."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        store_at(b, args[1], args[0], 0, 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), emit
