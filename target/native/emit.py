"""Emitting LLVM instructions: the few idioms the kernels are written in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba.core import cgutils

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
LANES = 16
"""Output channels of a panel, tokens of a tile, floats of a vector."""


def vector_of(element: Any, lanes: int = LANES) -> Any:
    """The vector type of `lanes` elements."""
    return ir.VectorType(element, lanes)


def const(element: Any, value: float, lanes: int = LANES) -> Any:
    """A constant vector."""
    return ir.Constant(vector_of(element, lanes), [value] * lanes)


def splat(b: Any, scalar: Any, lanes: int = LANES) -> Any:
    """A scalar in every lane."""
    empty = ir.Constant(vector_of(scalar.type, lanes), ir.Undefined)
    first = b.insert_element(empty, scalar, ir.Constant(I32, 0))
    return b.shuffle_vector(first, empty, const(I32, 0, lanes))


def offset(b: Any, address: Any, num_bytes: int) -> Any:
    """`address + num_bytes`."""
    return b.add(address, ir.Constant(I64, num_bytes)) if num_bytes else address


def load_at(b: Any, address: Any, num_bytes: int, kind: Any, align: int) -> Any:
    """The value of type `kind` at `address + num_bytes`."""
    value = b.load(b.inttoptr(offset(b, address, num_bytes), ir.PointerType(kind)))
    value.align = align
    return value


def store_at(b: Any, value: Any, address: Any, num_bytes: int, align: int) -> None:
    """Write `value` at `address + num_bytes`."""
    instruction = b.store(value, b.inttoptr(offset(b, address, num_bytes), ir.PointerType(value.type)))
    instruction.align = align


def prefetch_at(b: Any, address: Any, num_bytes: int) -> None:
    """Bring the cache line at `address + num_bytes` into the second-level cache."""
    place = b.inttoptr(offset(b, address, num_bytes), ir.PointerType(I8))
    call(b, "llvm.prefetch.p0", ir.VoidType(), [place, *(ir.Constant(I32, flag) for flag in (0, 2, 1))])


def call(b: Any, name: str, result: Any, args: Sequence[Any]) -> Any:
    """Call an LLVM intrinsic or a C function by name."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), args)


def fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z in float32 lanes, rounded once."""
    return call(b, f"llvm.fma.v{x.type.count}f32", x.type, [x, y, z])


class Accumulators:
    """Registers that live across a loop, as LLVM sees them: stack slots it promotes."""

    def __init__(self, b: Any, count: int, lanes: int) -> None:
        kind = vector_of(F32, lanes)
        self._slots = [cgutils.alloca_once(b, kind) for _ in range(count)]
        for i in range(count):
            self.set(b, i, ir.Constant(kind, [0.0] * lanes))

    def get(self, b: Any, i: int) -> Any:
        """The value of register `i`."""
        return b.load(self._slots[i])

    def set(self, b: Any, i: int, value: Any) -> None:
        """Give register `i` a value."""
        b.store(value, self._slots[i])


@contextmanager
def loop(b: Any, count: Any) -> Iterator[Any]:
    """A loop over [0, count); gives the index."""
    with cgutils.for_range(b, count) as body:
        yield body.index


def call_kernel(b: Any, name: str, args: Sequence[Any], body: Any) -> None:
    """Call the function `name` of this module, made on first use by `body(builder, *args)`; it returns nothing."""
    kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    function = b.module.globals.get(name)
    if function is None:
        function = ir.Function(b.module, kind, name)
        function.linkage = "internal"
        function.attributes.add("noinline")
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        body(builder, *function.args)
        builder.ret_void()
    b.call(function, args)
