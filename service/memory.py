"""Memory that a process has freed goes back to the system."""

from __future__ import annotations

import ctypes

MMAP_THRESHOLD = -3
"""`M_MMAP_THRESHOLD` of glibc's malloc.h."""
TRIM_THRESHOLD = -1
"""`M_TRIM_THRESHOLD` of glibc's malloc.h."""
LARGE_ALLOCATION_BYTES = 1024 * 1024


def keep_heap_small() -> None:
    """Have large blocks of memory come from the system and go back there when they are freed (glibc).

    By default glibc raises the size from which it does so with each such block that is freed, up to 32 MiB. What is
    smaller then stays in the heap, and anything small above it keeps it there.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(MMAP_THRESHOLD, LARGE_ALLOCATION_BYTES)
        set_option(TRIM_THRESHOLD, LARGE_ALLOCATION_BYTES)
