"""Memory for weights and caches: large pages, addresses that stay."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

ALIGNMENT = 64
_LARGE_PAGE = 2 << 20


class Arena:
    """One mapping that arrays are placed into, one behind the other. It lives as long as any array placed in it.

    Large pages, where the system grants them, keep address translation out of the way of streaming reads.
    """

    def __init__(self, num_bytes: int) -> None:
        size = -(-max(num_bytes, 1) // _LARGE_PAGE) * _LARGE_PAGE
        mapping = mmap.mmap(-1, size)
        mapping.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(mapping, np.uint8)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
        """An array of zeros in the arena. Raises `MemoryError` when it is full."""
        kind = np.dtype(dtype)
        num_bytes = int(np.prod(shape)) * kind.itemsize
        end = self._used + num_bytes
        if end > self._bytes.size:
            raise MemoryError(f"the arena has {self._bytes.size - self._used} bytes left; {num_bytes} were asked for")
        array = self._bytes[self._used : end].view(kind).reshape(shape)
        self._used = -(-end // ALIGNMENT) * ALIGNMENT
        return array

    def place(self, source: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        """A copy of `source` in the arena."""
        array = self.empty(source.shape, source.dtype)
        array[...] = source
        return array


def address_of(array: npt.NDArray[np.generic]) -> int:
    """Where the array's data begins."""
    return int(array.ctypes.data)


def aligned_size(array: npt.NDArray[np.generic]) -> int:
    """Bytes that `Arena.place` takes for it."""
    return -(-array.nbytes // ALIGNMENT) * ALIGNMENT
