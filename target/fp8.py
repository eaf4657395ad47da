"""Weights as 8-bit floats (e4m3, no infinities): a scale for each row of the weight, and one for each row it meets.

A row of activations is scaled by its own largest number when it gets here, so that no row depends on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from target.linear import Library, Linear

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
SMALLEST = 1e-12
"""A row of smaller numbers counts as if this were its largest, so that zeros have a scale too."""
MULTIPLE = 16
"""What the sizes of a matrix must be multiples of."""
LEAST_CAPABILITY = (8, 9)

QuantiseRows = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""From [n, inputs] to 8-bit floats of that shape and, [n, 1] float32, what each of their rows is multiplied by."""


def require_fp8(device: torch.device, dtype: torch.dtype) -> None:
    """Raises `ValueError`, naming setting, value and what would fit, where 8-bit products do not exist."""
    if device.type != "cuda":
        raise ValueError(
            f"quantization is 'fp8', which a CUDA device of compute capability 8.9 or later computes, and device is "
            f"{str(device)!r}; 'auto' fits every device, and on a CPU 'none', 'int8' and 'q4' may"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        raise ValueError(
            f"quantization is 'fp8', which needs compute capability 8.9 or later; device {str(device)!r} has "
            f"{'.'.join(map(str, capability))}, where 'auto' and 'none' fit"
        )
    if dtype != torch.bfloat16:
        raise ValueError(
            f"quantization is 'fp8', whose products come out in bfloat16, and dtype is "
            f"{str(dtype).removeprefix('torch.')!r}; 'auto' and 'bfloat16' fit"
        )


def fp8_library(quantise: QuantiseRows | None = None) -> Library:
    """What `target.linear.choose_products` may choose; `quantise` where `quantise_rows` is not the fastest."""
    return "fp8", partial(fp8_linear, quantise=quantise or quantise_rows)


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `QuantiseRows`."""
    wide = x.float()
    scales = wide.abs().amax(dim=1, keepdim=True).clamp_min_(SMALLEST).div_(LARGEST)
    return (wide / scales).to(FP8), scales


def fp8_linear(weight: torch.Tensor, bias: torch.Tensor | None, *, quantise: QuantiseRows) -> Linear:
    """The product with a weight that is quantised here; its rows come out in the dtype they come in.

    Raises `ValueError` for a matrix whose sizes are not multiples of 16.
    """
    if any(size % MULTIPLE for size in weight.shape):
        outputs, inputs = weight.shape
        raise ValueError(
            f"quantization is 'fp8', which needs matrices whose sizes are multiples of {MULTIPLE}; this model has one "
            f"of {outputs} x {inputs}, for which 'none' fits"
        )
    quantised, scales = quantise_rows(weight)
    columns, column_scales = quantised.t(), scales.t()

    def linear(x: torch.Tensor) -> torch.Tensor:
        rows, row_scales = quantise(x)
        return torch._scaled_mm(  # noqa: SLF001  the operator's name
            rows, columns, scale_a=row_scales, scale_b=column_scales, bias=bias, out_dtype=x.dtype
        )

    return linear
