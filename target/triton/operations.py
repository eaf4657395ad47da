"""A decoder's operations as one launch each."""

from __future__ import annotations

import torch
import triton

from target.fp8 import FP8, LARGEST, SMALLEST
from target.triton.layer_kernels import gated_kernel, norm_kernel, quantise_kernel

GATED_BLOCK = 1024


class TritonOperations:
    """See `target.operations.Operations`. Everything is computed in float32 and rounded once."""

    def normed(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return _norm(x, None, weight, eps)

    def add_normed(self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return _norm(x, delta, weight, eps)

    def gated(self, negated: torch.Tensor) -> torch.Tensor:
        num_rows, width = len(negated), negated.shape[1] // 2
        out = negated.new_empty(num_rows, width)
        gated_kernel[(num_rows, triton.cdiv(width, GATED_BLOCK))](negated, out, F=width, BLOCK=GATED_BLOCK)
        return out


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `target.fp8.QuantiseRows`."""
    num_rows, size = x.shape
    quantised = torch.empty_like(x, dtype=FP8)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=x.device)
    padded = triton.next_power_of_2(size)
    quantise_kernel[(num_rows,)](
        x,
        quantised,
        scales,
        LARGEST=LARGEST,
        SMALLEST=SMALLEST,
        K=size,
        K_PAD=padded,
        num_warps=_num_warps(padded),
    )
    return quantised, scales


def _norm(x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    num_rows, size = x.shape
    out = torch.empty_like(x)
    padded = triton.next_power_of_2(size)
    norm_kernel[(num_rows,)](
        x,
        x if delta is None else delta,
        weight,
        out,
        eps,
        E=size,
        E_PAD=padded,
        ADD=delta is not None,
        num_warps=_num_warps(padded),
    )
    return out


def _num_warps(padded: int) -> int:
    """For a program that holds a row of so many numbers."""
    return min(max(padded // 512, 1), 16)
