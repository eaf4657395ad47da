"""Calling a kernel by its address from compiled functions."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from target.native.compiling import intrinsic
from target.native.emit import I64


@intrinsic
def call_kernel_at(typingctx: Any, address: Any, arguments: Any) -> Any:
    """Call the C function at `address` with a tuple of integers, each passed as int64; see `compiling.c_function`."""
    count = len(arguments)

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64] * count)
        values = [b.extract_value(args[1], i) for i in range(count)]
        b.call(b.inttoptr(args[0], ir.PointerType(kind)), values)
        return context.get_dummy_value()

    return types.void(types.int64, types.UniTuple(types.int64, count)), emit
