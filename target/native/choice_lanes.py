"""Comparing and hashing sixteen tokens at a time."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from target.native.compiling import intrinsic
from target.native.emit import F32, I16, I32, I64, LANES, const, splat, vector_of
from target.native.vectors import F32x16, Lowered


def _mask(b: Any, condition: Any) -> Any:
    return b.zext(b.bitcast(condition, I16), I64)


@intrinsic
def lanes_at_least(typingctx: Any, vector: Any, bound: Any) -> Lowered:
    """Bit i is set where lane i is at least that of `bound`."""
    return types.int64(F32x16, F32x16), lambda c, b, s, args: _mask(b, b.fcmp_ordered(">=", *args))


@intrinsic
def lanes_at_most(typingctx: Any, vector: Any, bound: Any) -> Lowered:
    """Bit i is set where lane i is at most that of `bound`."""
    return types.int64(F32x16, F32x16), lambda c, b, s, args: _mask(b, b.fcmp_ordered("<=", *args))


@intrinsic
def masked_to_zero(typingctx: Any, vector: Any, lanes: Any) -> Lowered:
    """`vector` with 0 in the lanes whose bit is set."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        condition = b.bitcast(b.trunc(args[1], I16), ir.VectorType(ir.IntType(1), LANES))
        return b.select(condition, const(F32, 0.0), args[0])

    return F32x16(F32x16, types.int64), emit


@intrinsic
def first_lane(typingctx: Any, lanes: Any) -> Lowered:
    """The lowest bit that is set."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        name = "llvm.cttz.i64"
        kind = ir.FunctionType(I64, [I64, ir.IntType(1)])
        function = b.module.globals.get(name) or ir.Function(b.module, kind, name)
        return b.call(function, [args[0], ir.Constant(ir.IntType(1), 1)])

    return types.int64(types.int64), emit


@intrinsic
def noise_tails(typingctx: Any, key: Any, token_id: Any) -> Lowered:
    """A lower bound, within 2^-31, on 1 - u of the uniform numbers of sixteen tokens from `token_id` on.

    See `target.noise`: u is made of the hash of (key, token id).
    """

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        wide = vector_of(I64)
        offsets = ir.Constant(wide, list(range(1, LANES + 1)))
        ids = b.add(splat(b, args[1]), offsets)
        z = b.add(splat(b, args[0]), b.mul(ids, const(I64, _signed(0x9E3779B97F4A7C15))))
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            z = b.mul(b.xor(z, b.lshr(z, const(I64, shift))), const(I64, _signed(factor)))
        z = b.xor(z, b.lshr(z, const(I64, 31)))
        tail = b.trunc(b.lshr(b.not_(z), const(I64, 33)), vector_of(I32))
        return b.fmul(b.sitofp(tail, vector_of(F32)), const(F32, 2.0**-31))

    return F32x16(types.uint64, types.int64), emit


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
