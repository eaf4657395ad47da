"""A decoder of the Llama family: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from target.attention import AttentionBackend
from target.config import ModelConfig
from target.linear import Linear, MakeLinear
from target.operations import Operations
from target.rope import RotaryTable, Rotation
from target.weights import LayerWeights, ModelWeights


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: Linear
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    output: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    """Both projections negated; see `Operations.gated`."""
    down: Linear


class Decoder:
    """The layers of a model, made of operations whose rows do not depend on one another.

    `device`: where it computes. `make_linear` and `operations` decide how.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        rotary: RotaryTable,
        make_linear: MakeLinear,
        operations: Operations,
        device: torch.device,
    ) -> None:
        self._config = config
        self._rotary = rotary
        self._operations = operations
        self._embed = weights.embed.to(device)
        self._norm = weights.norm.to(device)
        self._layers = [_pack(layer, make_linear, device) for layer in weights.layers]

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        feature_layers: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The last hidden states after the final norm, [n, E], and the hidden states after `feature_layers`.

        `token_ids`, `positions`: [n]. Features: [n, len(feature_layers) * E]; layer 0 is the embedding, -1 the last
        hidden state after the final norm.
        """
        operations, eps = self._operations, self._config.rms_norm_eps
        x = self._embed.index_select(0, token_ids)
        cos, sin = (table.index_select(0, positions) for table in (self._rotary.cos, self._rotary.sin))
        kept = {0: x.clone()} if 0 in feature_layers else {}
        normed = operations.normed(x, self._layers[0].input_norm, eps)
        for i, layer in enumerate(self._layers):
            qkv = layer.qkv(normed).view(len(x), -1, self._config.head_size)
            attended = attention.attend(i, qkv, Rotation(cos, sin, layer.head_norms, eps))
            normed = operations.add_normed(x, layer.output(attended), layer.post_norm, eps)
            following = self._layers[i + 1].input_norm if i + 1 < len(self._layers) else self._norm
            normed = operations.add_normed(x, layer.down(operations.gated(layer.gate_up(normed))), following, eps)
            if i + 1 in feature_layers:
                kept[i + 1] = x.clone()
        if -1 in feature_layers:
            kept[-1] = normed
        return normed, torch.cat([kept[i] for i in feature_layers], dim=-1) if feature_layers else None


def _pack(layer: LayerWeights, make_linear: MakeLinear, device: torch.device) -> _Layer:
    bias = None if layer.qkv_bias is None else layer.qkv_bias.to(device)
    q_norm, k_norm = layer.q_norm, layer.k_norm
    norms = None if q_norm is None or k_norm is None else (q_norm.to(device), k_norm.to(device))
    return _Layer(
        input_norm=layer.input_norm.to(device),
        qkv=make_linear(layer.qkv.to(device), bias),
        head_norms=norms,
        output=make_linear(layer.output.to(device), None),
        post_norm=layer.post_norm.to(device),
        gate_up=make_linear(layer.gate_up.to(device).neg(), None),
        down=make_linear(layer.down.to(device), None),
    )
