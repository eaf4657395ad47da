"""A stand-in for `torch._scaled_mm` on a CUDA device: computes in float32, and asks for what the operator asks for."""

from __future__ import annotations

import torch

from target.fp8 import FP8


def scaled_product(
    rows: torch.Tensor,
    columns: torch.Tensor,
    *,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """[m, n] of `rows` [m, k] and `columns` [k, n], scaled by `scale_a` [m, 1] and `scale_b` [1, n]."""
    (num_rows, inputs), (_, outputs) = rows.shape, columns.shape
    assert rows.dtype == columns.dtype == FP8
    assert rows.is_contiguous()
    assert columns.t().is_contiguous()
    assert num_rows % 16 == inputs % 16 == outputs % 16 == 0
    assert scale_a.dtype == scale_b.dtype == torch.float32
    assert scale_a.is_contiguous()
    assert scale_b.t().is_contiguous()
    assert (scale_a.shape, scale_b.shape) == ((num_rows, 1), (1, outputs))
    product = rows.float() @ columns.float() * scale_a * scale_b
    if bias is not None:
        assert bias.dtype == out_dtype
        product += bias.float()
    return product.to(out_dtype)
