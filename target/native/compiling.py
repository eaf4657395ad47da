"""Compiling Python to machine code that runs without the GIL, and keeping the result on disk.

The innermost loops are C functions called by address. Called by name, Numba would link them into each of their callers,
and optimise them once more for every level of calls.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

import llvmlite
import numba
from numba import types
from numba.core.ccallback import CFunc
from numba.extending import intrinsic as numba_intrinsic

from target.native.kept_code import CodeFolder, cache_in, code_folder

Function = TypeVar("Function", bound=Callable[..., object])

_FOLDER: ContextVar[CodeFolder | None] = ContextVar("folder of compiled code", default=None)
"""Where `kept_in` keeps what is compiled inside it."""


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
    """`function` of so many int64 as a C function: called by address, it is compiled once and not once per caller.

    Inside `kept_in` its code is kept; elsewhere it is compiled anew.
    """
    compiled: Any = CFunc(function, ((types.int64,) * num_arguments, types.void), locals={}, options={})
    compiled._cache = cache_in(_FOLDER.get(), function)  # noqa: SLF001  `enable_caching` takes Numba's own cache
    compiled.compile()
    return compiled


@contextmanager
def kept_in(cache_dir: Path, entry_point: Callable[..., object]) -> Iterator[bool]:
    """Code that is compiled inside is kept in `cache_dir` for the next process: C functions, and `entry_point`.

    Gives whether code is there already. Code of other versions of these sources lies in folders of its
    own. A folder that is full, damaged, or not the user's own alone is reported once, and costs a compilation.
    """
    folder = code_folder(cache_dir.absolute() / "native" / _fingerprint())
    folder.mark_used()
    token = _FOLDER.set(folder)
    try:
        dispatcher: Any = entry_point
        dispatcher._cache = cache_in(folder, dispatcher.py_func)  # noqa: SLF001  see `c_function`
        yield folder.holds_code()
    finally:
        _FOLDER.reset(token)


@functools.cache
def _fingerprint() -> str:
    """A digest of every source the machine code comes from, and of the versions of what compiles it."""
    versions = f"{sys.implementation.cache_tag} {numba.__version__} {llvmlite.__version__}"
    digest = hashlib.blake2b(versions.encode(), digest_size=8)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
