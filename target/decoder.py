"""A decoder of the Llama family: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from target.attention import AttentionBackend
from target.config import ModelConfig
from target.linear import Linear, MakeLinear
from target.rope import RotaryTable
from target.weights import LayerWeights, ModelWeights


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    """Both projections negated; see `_gated`."""
    down: Linear


class Decoder:
    """The layers of a model, made of operations whose rows do not depend on one another.

    `device`: where it computes. `make_linear` decides how products are computed.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        rotary: RotaryTable,
        make_linear: MakeLinear,
        device: torch.device,
    ) -> None:
        self._config = config
        self._rotary = rotary
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
        """The last hidden states before the final norm, [n, E], and the hidden states after `feature_layers`.

        `token_ids`, `positions`: [n]. Features: [n, len(feature_layers) * E]; layer 0 is the embedding, -1 the last
        hidden state after the final norm.
        """
        x = self._embed.index_select(0, token_ids)
        cos = self._rotary.cos.index_select(0, positions)[:, None]
        sin = self._rotary.sin.index_select(0, positions)[:, None]
        kept = {0: x.clone()} if 0 in feature_layers else {}
        for i, layer in enumerate(self._layers):
            x.add_(layer.output(attention.attend(i, self._qkv(layer, x, cos, sin))))
            x.add_(layer.down(_gated(layer.gate_up(self._normed(x, layer.post_norm)))))
            if i + 1 in feature_layers:
                kept[i + 1] = x.clone()
        if -1 in feature_layers:
            kept[-1] = self.final_norm(x)
        return x, torch.cat([kept[i] for i in feature_layers], dim=-1) if feature_layers else None

    def final_norm(self, x: torch.Tensor) -> torch.Tensor:
        """[n, E] hidden states, normalised for the output head."""
        return self._normed(x, self._norm)

    def _qkv(self, layer: _Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[n, H + 2K, D] projected, normalised where the model does, and rotated."""
        heads, keys, size = self._config.num_heads, self._config.num_kv_heads, self._config.head_size
        qkv = layer.qkv(self._normed(x, layer.input_norm)).view(-1, heads + 2 * keys, size)
        if layer.q_norm is not None and layer.k_norm is not None:
            qkv[:, :heads] = functional.rms_norm(qkv[:, :heads], (size,), layer.q_norm, self._config.rms_norm_eps)
            qkv[:, heads : heads + keys] = functional.rms_norm(
                qkv[:, heads : heads + keys], (size,), layer.k_norm, self._config.rms_norm_eps
            )
        rotated = qkv[:, : heads + keys]
        swapped = torch.cat((rotated[..., size // 2 :], rotated[..., : size // 2]), dim=-1)
        rotated.mul_(cos).addcmul_(swapped, sin)
        return qkv

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self._config.rms_norm_eps)


def _pack(layer: LayerWeights, make_linear: MakeLinear, device: torch.device) -> _Layer:
    bias = None if layer.qkv_bias is None else layer.qkv_bias.to(device)
    return _Layer(
        input_norm=layer.input_norm.to(device),
        qkv=make_linear(layer.qkv.to(device), bias),
        q_norm=None if layer.q_norm is None else layer.q_norm.to(device),
        k_norm=None if layer.k_norm is None else layer.k_norm.to(device),
        output=make_linear(layer.output.to(device), None),
        post_norm=layer.post_norm.to(device),
        gate_up=make_linear(layer.gate_up.to(device).neg(), None),
        down=make_linear(layer.down.to(device), None),
    )


def _gated(negated: torch.Tensor) -> torch.Tensor:
    """SwiGLU: silu(gate) * up, of [n, 2F] -gate and -up; [n, F].

    `torch.nn.functional.silu` rounds differently in the remainder of its vector loop, so that an element's result
    depends on its place in the tensor; `exp` does not. The signs of the two cancel in gate * up.
    """
    gate, up = negated.chunk(2, dim=-1)
    return (gate * up).div_(gate.exp().add_(1.0))
