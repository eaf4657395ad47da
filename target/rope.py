"""Rotary position embedding (Su et al., arXiv 2104.09864), with the frequency scaling of Llama 3.1."""

from __future__ import annotations

import math

import torch

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
