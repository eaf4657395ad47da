"""Triton kernels of what stands between a layer's products."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_kernel(x, delta, weight, out, eps, E: tl.constexpr, E_PAD: tl.constexpr, ADD: tl.constexpr):
    """RMSNorm of one row; where ADD, of x + delta, which becomes x."""
    at = tl.program_id(0).to(tl.int64) * E
    i = tl.arange(0, E_PAD)
    there = i < E
    row = tl.load(x + at + i, mask=there, other=0.0)
    if ADD:
        row = (row.to(tl.float32) + tl.load(delta + at + i, mask=there, other=0.0).to(tl.float32)).to(row.dtype)
        tl.store(x + at + i, row, mask=there)
    wide = row.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / E + eps)
    normed = wide * scale * tl.load(weight + i, mask=there, other=0.0).to(tl.float32)
    tl.store(out + at + i, normed.to(row.dtype), mask=there)


@triton.jit
def gated_kernel(negated, out, F: tl.constexpr, BLOCK: tl.constexpr):
    """silu(gate) * up of a stretch of one row, of -gate and -up: the signs cancel in their product."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = i < F
    gate = tl.load(negated + row * 2 * F + i, mask=there, other=0.0).to(tl.float32)
    up = tl.load(negated + row * 2 * F + F + i, mask=there, other=0.0).to(tl.float32)
    result = gate * up / (tl.exp(gate) + 1.0)
    tl.store(out + row * F + i, result.to(out.dtype.element_ty), mask=there)


@triton.jit
def quantise_kernel(
    x,  # [n, K]
    quantised,  # 8-bit floats [n, K]
    scales,  # float32 [n]
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
):
    """One row so scaled that its largest number is the type's largest, and what undoes that."""
    row = tl.program_id(0)
    at = row.to(tl.int64) * K
    i = tl.arange(0, K_PAD)
    there = i < K
    wide = tl.load(x + at + i, mask=there, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(wide), axis=0), SMALLEST), LARGEST)
    tl.store(scales + row, scale)
    tl.store(quantised + at + i, tl.div_rn(wide, scale).to(quantised.dtype.element_ty), mask=there)
