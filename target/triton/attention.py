"""The Triton attention backend."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
import triton

from target.attention import HeadLayout
from target.batch import ForwardBatch, IntArray
from target.kv_pool import KVPool
from target.rope import Rotation
from target.triton.attention_kernels import attend_kernel, merge_kernel, rotate_and_write_kernel
from target.triton.attention_work import HEADER, WorkShape, plan_work

SPLIT = 256
"""Keys of a split: few enough that one sequence of some thousand tokens occupies the device."""
PIECES_BYTES = 64 << 20
"""Memory for rows' splits that are reduced apart."""
PROGRAMS_A_PROCESSOR = 4
SMALLEST_TILE = 16
"""Least rows of a matrix that the tensor cores multiply."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TritonAttention:
    """See `target.attention.AttentionBackend`. Three launches a layer, whose shapes depend on `num_rows` alone.

    Products are made in the pool's precision and summed in float32. What `begin` computes lies in one buffer, `work`,
    whose address stays the same as long as it is large enough: a captured graph reads the next step's from there.
    Raises `ValueError` for a precision without kernels.
    """

    def __init__(
        self,
        pool: KVPool,
        heads: HeadLayout,
        *,
        window: int | None,
        split: int = SPLIT,
        pieces_bytes: int = PIECES_BYTES,
    ) -> None:
        entries, size = pool.entries, heads.head_size
        if entries.dtype not in DTYPES:
            raise ValueError(f"dtype is {entries.dtype}; Triton attention has {', '.join(map(str, DTYPES))}")
        self._pool, self._heads, self._window = pool, heads, window
        self._tile = max(SMALLEST_TILE, triton.next_power_of_2(heads.queries_per_kv))
        padded = max(16, triton.next_power_of_2(size))
        max_pieces = max(1, pieces_bytes // (4 * heads.num_heads * (size + 2)))
        self._shape = WorkShape(self._tile // heads.queries_per_kv, split, max_pieces)
        self._maxima, self._sums = torch.empty((2, max_pieces, heads.num_heads), device=entries.device)
        self._values = torch.empty((max_pieces, heads.num_heads, size), device=entries.device)
        self._staged = _Staged(entries.device)
        is_cuda = entries.device.type == "cuda"
        processors = torch.cuda.get_device_properties(entries.device).multi_processor_count if is_cuda else 1
        self._num_programs = PROGRAMS_A_PROCESSOR * processors
        self._dims = {"H": heads.num_heads, "K": heads.num_kv_heads, "D": size}
        self._tiles = self._dims | {
            "D_PAD": padded,
            "GROUP": heads.queries_per_kv,
            "TILE": self._tile,
            "KEYS": min(32 if padded > 128 else 64, split),
            "SPLIT": split,
            "BLOCK_SIZE": pool.block_size,
            "INTERPRETED": not is_cuda,
        }
        self._merging = {
            "H": heads.num_heads,
            "D": size,
            "D_PAD": padded,
            "GROUP": heads.queries_per_kv,
            "GROUP_PAD": triton.next_power_of_2(heads.queries_per_kv),
        }

    @property
    def work(self) -> torch.Tensor:
        """The buffer that launches read from; another one after a `begin` that needed more room."""
        return self._staged.device

    def begin(self, batch: ForwardBatch, num_rows: int) -> None:
        """See `AttentionBackend.begin`."""
        self.stage(batch, num_rows, np.empty(0, np.int64))

    def stage(self, batch: ForwardBatch, num_rows: int, front: IntArray) -> torch.Tensor:
        """`begin`, with other integers of the step along in the same copy: gives them on the device, int32.

        Their address depends on `work` alone.
        """
        self._staged.put(plan_work(batch, num_rows, front=front, window=self._window, shape=self._shape))
        return self.work[HEADER : HEADER + len(front)]

    def attend(self, layer: int, qkv: torch.Tensor, rotation: Rotation | None = None) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        num_rows, pool = len(qkv), self._pool.entries[layer]
        self._rotate_and_write(pool, qkv, rotation)
        out = qkv.new_empty(num_rows, self._heads.num_heads * self._heads.head_size)
        attend_kernel[(self._num_programs,)](
            qkv,
            pool,
            self.work,
            out,
            self._maxima,
            self._sums,
            self._values,
            self._heads.head_size**-0.5 * math.log2(math.e),
            pool.stride(0),
            **self._tiles,
            num_warps=4,
            num_stages=3,
            enable_fp_fusion=False,
        )
        # Sums must come out alike in both kernels, so neither may contract a product and a sum its own way.
        merge_kernel[(num_rows, self._heads.num_kv_heads)](
            self.work,
            self._maxima,
            self._sums,
            self._values,
            out,
            **self._merging,
            num_warps=2,
            enable_fp_fusion=False,
        )
        return out

    def _rotate_and_write(self, pool: torch.Tensor, qkv: torch.Tensor, rotation: Rotation | None) -> None:
        norms = None if rotation is None else rotation.norms
        rotate_and_write_kernel[(len(qkv), qkv.shape[1])](
            qkv,
            pool,
            self.work,
            qkv if rotation is None else rotation.cos,
            qkv if rotation is None else rotation.sin,
            qkv if norms is None else norms[0],
            qkv if norms is None else norms[1],
            0.0 if rotation is None else rotation.eps,
            pool.stride(0),
            **self._dims,
            HALF_PAD=triton.next_power_of_2(self._heads.head_size // 2),
            ROTATE=rotation is not None,
            NORM=norms is not None,
            num_warps=1,
        )


class _Staged:
    """Integers on their way to the device: one copy, out of memory that the device can read while the host goes on."""

    def __init__(self, device: torch.device) -> None:
        self._pins = device.type == "cuda"
        self.device = torch.zeros(HEADER, dtype=torch.int32, device=device)
        self._host: list[torch.Tensor] = []
        self._turn = 0

    def put(self, numbers: npt.NDArray[np.int32]) -> None:
        if not self._host or len(numbers) > len(self._host[0]):
            size = 1 << max(len(numbers) - 1, 4095).bit_length()
            self._host = [torch.zeros(size, dtype=torch.int32, pin_memory=self._pins) for _ in range(2)]
            self.device = torch.zeros(size, dtype=torch.int32, device=self.device.device)
        # The device may still read what was put last; a step ends with a synchronisation, so that before it is read.
        self._turn = 1 - self._turn
        host = self._host[self._turn][: len(numbers)]
        host.numpy()[:] = numbers
        self.device[: len(numbers)].copy_(host, non_blocking=True)
