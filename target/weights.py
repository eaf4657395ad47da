"""A decoder's weights as plain tensors, the common source of every runner."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(slots=True)
class LayerWeights:
    """One layer. H heads, K key-value heads of size D; E the hidden size, F the width of the MLP."""

    input_norm: torch.Tensor
    """[E]"""
    qkv: torch.Tensor
    """[(H + 2K) * D, E] the query heads, then the key heads, then the value heads."""
    qkv_bias: torch.Tensor | None
    """[(H + 2K) * D]"""
    q_norm: torch.Tensor | None
    """[D], before the rotation"""
    k_norm: torch.Tensor | None
    """[D], before the rotation"""
    output: torch.Tensor
    """[E, H * D]"""
    post_norm: torch.Tensor
    """[E]"""
    gate_up: torch.Tensor
    """[2F, E] the gate, then the up projection."""
    down: torch.Tensor
    """[E, F]"""

    @property
    def linears(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Each matrix with its bias."""
        return [(self.qkv, self.qkv_bias), *((matrix, None) for matrix in (self.output, self.gate_up, self.down))]


@dataclass(slots=True)
class ModelWeights:
    """A whole decoder, on the CPU, in the dtype it was loaded as."""

    embed: torch.Tensor
    """[vocabulary, E]"""
    layers: Iterable[LayerWeights]
    """First to last, as often as asked. A folder's are read on the way, so that few exist at a time: keep none."""
    norm: torch.Tensor
    """[E]"""
    lm_head: torch.Tensor
    """[vocabulary, E]; the same tensor as `embed` where they are tied."""
