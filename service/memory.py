"""Memory of the front: what large work has used goes back to the system."""

from __future__ import annotations

import asyncio
import ctypes

TRIM_BYTES = 1024 * 1024
"""Bytes of text after which the allocator is asked to give memory back."""
TRIM_PAUSE_SECONDS = 0.5

MMAP_THRESHOLD = -3
"""`M_MMAP_THRESHOLD` of glibc's malloc.h."""
TRIM_THRESHOLD = -1
"""`M_TRIM_THRESHOLD` of glibc's malloc.h."""
LARGE_ALLOCATION_BYTES = 256 * 1024


class MemoryKeeper:
    """Has the allocator give back to the system what large work left behind, once that work is over."""

    def __init__(self) -> None:
        self._num_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def note(self, num_bytes: int, *, is_idle: bool) -> None:
        """Count `num_bytes` that were worked on; `is_idle` says that no other work waits."""
        self._num_bytes += num_bytes
        if is_idle and self._num_bytes >= TRIM_BYTES and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TRIM_PAUSE_SECONDS, self._trim)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _trim(self) -> None:
        self._timer, self._num_bytes = None, 0
        asyncio.get_running_loop().run_in_executor(None, trim_memory)


def trim_memory() -> None:
    """Give free memory back to the system, where the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_heap_small() -> None:
    """Have large blocks of memory come from the system and go back there when they are freed (glibc).

    By default glibc raises the size from which it does so with each such block that is freed, up to 32 MiB. What is
    smaller then stays in the heap, and anything small above it keeps it there.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(MMAP_THRESHOLD, LARGE_ALLOCATION_BYTES)
        set_option(TRIM_THRESHOLD, LARGE_ALLOCATION_BYTES)
