"""Rotary position embedding (Su et al., arXiv 2104.09864), with the frequency scaling of Llama 3.1."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn import functional

from target.config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """[head_size / 2] float32: radians a position, for each pair of dimensions."""
    exponents = torch.arange(0, config.head_size, 2, dtype=torch.int64).float() / config.head_size
    frequencies = 1.0 / (config.rope_theta**exponents)
    return frequencies if config.rope_scaling is None else _scale(frequencies, config.rope_scaling)


def _scale(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    original = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


class RotaryTable:
    """Cosines and sines of every position below `max_len`, computed once so that a position has one value.

    `cos` and `sin` have shape [max_len, head_size]; the first half of `sin` is negated, so that
    `x * cos + swap(x) * sin` with the halves of x swapped is the rotation.
    """

    def __init__(self, config: ModelConfig, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32), inverse_frequencies(config))
        cos, sin = angles.cos(), angles.sin()
        self.cos = torch.cat((cos, cos), dim=-1).to(device, dtype)
        self.sin = torch.cat((-sin, sin), dim=-1).to(device, dtype)


@dataclass(frozen=True, slots=True)
class Rotation:
    """What becomes of projected heads before they meet: normalised where the model does so, then rotated."""

    cos: torch.Tensor
    """[n, D] of `RotaryTable`, of each row's position"""
    sin: torch.Tensor
    """[n, D]"""
    norms: tuple[torch.Tensor, torch.Tensor] | None
    """[D] of the query heads, [D] of the key heads"""
    eps: float

    def apply(self, qkv: torch.Tensor, num_heads: int, num_kv_heads: int) -> None:
        """Rotate the query and key heads of [n, H + 2K, D] in place."""
        keys_end, size = num_heads + num_kv_heads, qkv.shape[-1]
        if self.norms is not None:
            for heads, weight in zip((qkv[:, :num_heads], qkv[:, num_heads:keys_end]), self.norms, strict=True):
                heads.copy_(functional.rms_norm(heads, (size,), weight, self.eps))
        rotated = qkv[:, :keys_end]
        swapped = torch.cat((rotated[..., size // 2 :], rotated[..., : size // 2]), dim=-1)
        rotated.mul_(self.cos[:, None]).addcmul_(swapped, self.sin[:, None])
