"""Compiling Python to machine code without the GIL, with the result kept on disk.

The innermost loops are C functions called by address. Called by name, Numba would link them into each of their callers,
and optimise them once more for every level of calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
from numba import types
from numba.extending import intrinsic as numba_intrinsic

Function = TypeVar("Function", bound=Callable[..., object])


def native(function: Function) -> Function:
    """Compile `function` on first use; it runs without the GIL and rounds exactly as written (no reassociation)."""
    compiled: Function = numba.njit(nogil=True, fastmath=False, error_model="numpy", cache=False)(function)
    return compiled


def entry_point(function: Function) -> Function:
    """As `native`, for a function Python calls: its machine code, callees included, is kept in Numba's cache folder."""
    compiled: Function = numba.njit(nogil=True, fastmath=False, error_model="numpy", cache=True)(function)
    return compiled


def intrinsic(function: Function) -> Function:
    """A function whose body is LLVM instructions. Constants among its arguments are seen as literals; the signature it
    returns must repeat their types, or Numba takes calls with different constants for the same function."""
    lowered: Function = numba_intrinsic(prefer_literal=True)(function)
    return lowered


def c_function(function: Callable[..., None], num_arguments: int) -> Any:
    """`function` of so many int64 as a C function: called by address, its machine code is compiled once, not per caller."""
    return numba.cfunc(types.void(*[types.int64] * num_arguments), cache=True)(function)

