"""Compiling Python to machine code that runs without the GIL, and keeping the result on disk.

The innermost loops are C functions called by address. Called by name, Numba would link them into each of their callers,
and optimise them once more for every level of calls.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import llvmlite
import numba
from numba import types
from numba.extending import intrinsic as numba_intrinsic

Function = TypeVar("Function", bound=Callable[..., object])


def native(function: Function) -> Function:
    """Compile `function` on first use; it runs without the GIL and rounds exactly as written (no reassociation)."""
    compiled: Function = numba.njit(nogil=True, fastmath=False, error_model="numpy")(function)
    return compiled


def intrinsic(function: Callable[..., Any]) -> Any:
    """A function whose body is LLVM instructions. Constants among its arguments are seen as literals; the signature it
    returns must repeat their types, or Numba takes calls with different constants for the same function.
    """
    return numba_intrinsic(prefer_literal=True)(function)


def c_function(function: Callable[..., None], num_arguments: int) -> Any:
    """`function` of so many int64 as a C function: called by address, it is compiled once and not once per caller."""
    return numba.cfunc(types.void(*[types.int64] * num_arguments), cache=True)(function)


@contextmanager
def kept_in(cache_dir: Path, entry_point: Callable[..., object]) -> Iterator[bool]:
    """What is compiled inside is kept in `cache_dir` for the next process: C functions, and `entry_point`.

    Gives whether something is there already. Code of other versions of these sources lies in folders of its own. Where
    the folder cannot be written, nothing is kept.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = cache_dir / "native" / _fingerprint()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            folder = Path(temporary)
        before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(folder)
        try:
            entry_point.enable_caching()  # type: ignore[attr-defined]  # a Numba dispatcher
            yield next(folder.glob("*/*.nbi"), None) is not None
        finally:
            numba.config.CACHE_DIR = before


def _fingerprint() -> str:
    """Of every source the machine code comes from: Numba itself looks at the entry point's file alone."""
    digest = hashlib.blake2b(f"{numba.__version__} {llvmlite.__version__}".encode(), digest_size=8)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
