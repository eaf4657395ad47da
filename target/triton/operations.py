"""A decoder's operations as one launch each."""

from __future__ import annotations

import torch
import triton

from target.triton.layer_kernels import gated_kernel, norm_kernel

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
        num_warps=min(max(padded // 512, 1), 16),
    )
    return out
