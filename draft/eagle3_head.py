"""The EAGLE-3 head (Li et al., arXiv 2503.01840): one decoder layer over the target's features.

A *pair* i is the feature of token i (hidden states of a few target layers, fused to the hidden size) beside the
embedding of token i + 1, and the head says from it what token i + 2 will be. Behind the newest token the head goes on
with its own output in place of the feature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch.nn import functional

from target.attention import HeadLayout, TorchAttention
from target.batch import ForwardBatch
from target.config import ModelConfig
from target.kv_pool import KVPool
from target.linear import can_pack, packed_linear, plain_linear
from target.rope import RotaryTable
from target.row_stability import Tiles
from target.runner import MovableKV

FeatureNorm = Literal["none", "each", "all"]


@dataclass(frozen=True, slots=True)
class Eagle3Architecture:
    """A head's architecture, in the words of the `speculators` format."""

    layer: ModelConfig
    """Its decoder layer, with the target's vocabulary."""
    feature_layers: tuple[int, ...]
    """Target layers it reads (`eagle_aux_hidden_state_layer_ids`), as in `ForwardBatch.feature_layers`."""
    draft_vocab_size: int
    norm_before_residual: bool = False
    """Whether the residual is the normalised hidden state (`hidden_norm`)."""
    feature_norm: FeatureNorm = "none"
    """RMS norm before the fusing product: of each layer's feature (`fc_norm`), or of all as one (`norm_before_fc`)."""
    norm_output: bool = False
    """Whether it is the normalised output that goes on in place of a feature."""


@dataclass(slots=True)
class Eagle3Weights:
    """A head's weights. E hidden size, A features, H query and K key-value heads of D, F the MLP, C draft tokens."""

    fc: torch.Tensor
    """[E, A * E]"""
    feature_norm: torch.Tensor | None
    """[A * E]"""
    input_norm: torch.Tensor
    """[E] of the embedding"""
    hidden_norm: torch.Tensor
    """[E] of the feature"""
    qkv: torch.Tensor
    """[(H + 2K) * D, 2E] reads the embedding, then the feature."""
    q_norm: torch.Tensor | None
    """[D]"""
    k_norm: torch.Tensor | None
    """[D]"""
    output: torch.Tensor
    """[E, H * D]"""
    post_norm: torch.Tensor
    """[E]"""
    gate_up: torch.Tensor
    """[2F, E]"""
    down: torch.Tensor
    """[E, F]"""
    norm: torch.Tensor
    """[E]"""
    lm_head: torch.Tensor
    """[C, E]"""
    target_ids: torch.Tensor
    """[C] int64, ascending: the target's id of each row of `lm_head`."""
    embed: torch.Tensor
    """[vocabulary, E], of any float dtype"""


class PairHead(Protocol):
    """A loaded head with its KV pool, as the proposer sees it."""

    @property
    def config(self) -> Eagle3Architecture: ...

    @property
    def target_ids(self) -> torch.Tensor:
        """[C] ascending"""

    @property
    def kv_pool(self) -> MovableKV: ...

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """[n, E] of features [n, A * E]."""

    def forward(self, batch: ForwardBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the pairs' keys and values; logits [R, C] float and outputs [R, E] of the batch's logit rows.

        `batch` carries each pair's token; `hidden` [T, E] its feature, or a former output of this function.
        """


class Eagle3Head:
    """A `PairHead` in plain torch. Everything it knows of a sequence is in its KV pool of one layer."""

    def __init__(self, config: Eagle3Architecture, weights: Eagle3Weights, *, num_blocks: int, block_size: int) -> None:
        """`weights` on the device and in the dtype to compute in; the embedding may be anywhere, in any dtype."""
        layer = config.layer
        self.config = config
        self.device, self._dtype = weights.fc.device, weights.fc.dtype
        self.target_ids = weights.target_ids
        self.kv_pool = KVPool(
            num_layers=1,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=layer.num_kv_heads,
            head_size=layer.head_size,
            dtype=self._dtype,
            device=self.device,
        )
        heads = HeadLayout(layer.num_heads, layer.num_kv_heads, layer.head_size)
        # Nothing depends on a draft's last bits, so any tile will do.
        self._attention = TorchAttention(self.kv_pool, heads, window=None, tiles=Tiles((1, 8), 1, stable=False))
        self._rotary = RotaryTable(layer, layer.max_model_len, self._dtype, self.device)
        make = packed_linear if can_pack(self._dtype, self.device) else plain_linear
        matrices = (weights.fc, weights.qkv, weights.output, weights.gate_up, weights.down, weights.lm_head)
        self._fc, self._qkv, self._output, self._gate_up, self._down, self._lm_head = (
            make(matrix, None) for matrix in matrices
        )
        self._weights = weights

    @torch.inference_mode()
    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """See `PairHead.fuse`."""
        states = states.to(self.device, self._dtype)
        if self.config.feature_norm == "all":
            states = self._normed(states, self._weights.feature_norm)
        elif self.config.feature_norm == "each":
            size = self.config.layer.hidden_size
            parts = functional.rms_norm(states.view(len(states), -1, size), (size,), None, self._eps)
            assert self._weights.feature_norm is not None
            states = parts.flatten(1) * self._weights.feature_norm
        return self._fc(states)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PairHead.forward`."""
        weights = self._weights
        wanted = torch.from_numpy(batch.logit_rows).to(self.device)
        features = self._normed(hidden, weights.hidden_norm)
        pair = torch.cat((self._normed(self._embedded(batch), weights.input_norm), features), dim=-1)
        self._attention.begin(batch, len(pair))
        attended = self._attention.attend(0, self._rotated(self._qkv(pair), batch)).index_select(0, wanted)
        if not len(wanted):
            return attended.new_empty(0, len(self.target_ids)), attended.new_empty(0, hidden.shape[1])
        x = (features if self.config.norm_before_residual else hidden).index_select(0, wanted) + self._output(attended)
        gate, up = self._gate_up(self._normed(x, weights.post_norm)).chunk(2, dim=-1)
        x = x + self._down(functional.silu(gate) * up)
        normed = self._normed(x, weights.norm)
        return self._lm_head(normed), normed if self.config.norm_output else x

    def _embedded(self, batch: ForwardBatch) -> torch.Tensor:
        """[T, E]"""
        table = self._weights.embed
        token_ids = torch.from_numpy(batch.token_ids).to(table.device)
        return table.index_select(0, token_ids).to(self.device, self._dtype)

    def _rotated(self, qkv: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        layer = self.config.layer
        positions = torch.from_numpy(batch.positions).to(self.device)
        cos, sin = self._rotary.cos[positions, None], self._rotary.sin[positions, None]
        qkv = qkv.view(len(qkv), -1, layer.head_size)
        keys_end = layer.num_heads + layer.num_kv_heads
        if layer.qk_norm:
            size = (layer.head_size,)
            queries, keys = qkv[:, : layer.num_heads], qkv[:, layer.num_heads : keys_end]
            queries.copy_(functional.rms_norm(queries, size, self._weights.q_norm, self._eps))
            keys.copy_(functional.rms_norm(keys, size, self._weights.k_norm, self._eps))
        rotated = qkv[:, :keys_end]
        half = layer.head_size // 2
        swapped = torch.cat((rotated[..., half:], rotated[..., :half]), dim=-1)
        rotated.mul_(cos).addcmul_(swapped, sin)
        return qkv

    @property
    def _eps(self) -> float:
        return self.config.layer.rms_norm_eps

    def _normed(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self._eps)
