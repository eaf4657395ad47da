"""The EAGLE-3 head (Li et al., arXiv 2503.01840): one decoder layer over the target's features.

A *pair* i is the feature of token i (hidden states of a few target layers, fused to the hidden size) beside the
embedding of token i + 1, and the head says from it what token i + 2 will be. Behind the newest token the head goes on
with its own output in place of the feature.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from target.attention import AttentionBackend, HeadLayout, TorchAttention
from target.batch import ForwardBatch
from target.config import ModelConfig
from target.kv_pool import KVPool
from target.linear import can_pack, packed_linear, plain_linear
from target.rope import RotaryTable, Rotation
from target.row_stability import Tiles
from target.runner import MovableKV
from target.transfers import to_device

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


@dataclass(frozen=True, slots=True)
class ChainWish:
    """How far to guess behind one sequence's last pair."""

    depth: int
    """Levels of guesses, at least one."""
    min_chance: float
    """Behind a path that is less likely nothing is guessed."""
    stops: Collection[int]
    """The target's ids of tokens behind which nothing is guessed."""
    temperature: float = 0.0
    """0: the likeliest tokens are wanted; else those that the target's noise at this temperature prefers."""
    keys: Sequence[int] = ()
    """[depth] of that noise, see `target.noise.noise_keys`."""


Level = tuple[list[int], list[float]]
"""Candidates for one place, likeliest first: the target's token ids, and how likely each is behind the path there.

With noise, against the other candidates.
"""


@runtime_checkable
class ChainHead(PairHead, Protocol):
    """A head that goes on with its likeliest guesses by itself: a whole draft in one call."""

    def guess(
        self,
        batch: ForwardBatch,
        hidden: torch.Tensor,
        features: torch.Tensor,
        sources: npt.NDArray[np.int64],
        wishes: Sequence[ChainWish],
        width: int,
    ) -> tuple[torch.Tensor, list[list[Level]]]:
        """`features` [n, A * E] fused, and the levels guessed for each of S sequences, `width` candidates each.

        `batch` carries pairs without trees, and one logit row a sequence, its last, behind which is guessed: its block
        tables have room for that. Row t has fused feature `sources[t]`, or where that is -1 `hidden[t]` ([T, E]).
        Batch, `hidden` and `features` may be overwritten.
        """


class Eagle3Layer:
    """What a head computes, as functions of tensors on its device; where keys and values lie is `attention`'s."""

    def __init__(self, config: Eagle3Architecture, weights: Eagle3Weights, attention: AttentionBackend) -> None:
        """`weights` on the device and in the dtype to compute in; the embedding may be anywhere, in any dtype."""
        layer = config.layer
        self._config, self._weights, self._attention = config, weights, attention
        self._device, self._dtype = weights.fc.device, weights.fc.dtype
        self._rotary = RotaryTable(layer, layer.max_model_len, self._dtype, self._device)
        q_norm, k_norm = weights.q_norm, weights.k_norm
        self._head_norms = None if q_norm is None or k_norm is None else (q_norm, k_norm)
        make = packed_linear if can_pack(self._dtype, self._device) else plain_linear
        matrices = (weights.fc, weights.qkv, weights.output, weights.gate_up, weights.down, weights.lm_head)
        self._fc, self._qkv, self._output, self._gate_up, self._down, self._lm_head = (
            make(matrix, None) for matrix in matrices
        )

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """See `PairHead.fuse`."""
        states = states.to(self._device, self._dtype)
        if self._config.feature_norm == "all":
            states = self._normed(states, self._weights.feature_norm)
        elif self._config.feature_norm == "each":
            size = self._config.layer.hidden_size
            parts = functional.rms_norm(states.view(len(states), -1, size), (size,), None, self._eps)
            assert self._weights.feature_norm is not None
            states = parts.flatten(1) * self._weights.feature_norm
        return self._fc(states)

    def pairs(
        self, token_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, wanted: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [R, C] and outputs [R, E] of the rows `wanted` [R].

        Of each pair its token and position, [T], and its feature or a former output, `hidden` [T, E].
        """
        weights = self._weights
        features = self._normed(hidden, weights.hidden_norm)
        embedded = weights.embed.index_select(0, token_ids.to(weights.embed.device)).to(self._device, self._dtype)
        pair = torch.cat((self._normed(embedded, weights.input_norm), features), dim=-1)
        cos, sin = (table.index_select(0, positions) for table in (self._rotary.cos, self._rotary.sin))
        qkv = self._qkv(pair).view(len(pair), -1, self._config.layer.head_size)
        attended = self._attention.attend(0, qkv, Rotation(cos, sin, self._head_norms, self._eps))
        attended = attended.index_select(0, wanted)
        if not len(wanted):
            return attended.new_empty(0, len(weights.target_ids)), attended.new_empty(0, hidden.shape[1])
        x = (features if self._config.norm_before_residual else hidden).index_select(0, wanted) + self._output(attended)
        gate, up = self._gate_up(self._normed(x, weights.post_norm)).chunk(2, dim=-1)
        x = x + self._down(functional.silu(gate) * up)
        normed = self._normed(x, weights.norm)
        return self._lm_head(normed), normed if self._config.norm_output else x

    @property
    def _eps(self) -> float:
        return self._config.layer.rms_norm_eps

    def _normed(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self._eps)


def head_pool(config: Eagle3Architecture, weights: Eagle3Weights, *, num_blocks: int, block_size: int) -> KVPool:
    """Keys and values of a head's one layer."""
    return KVPool(
        num_layers=1,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=config.layer.num_kv_heads,
        head_size=config.layer.head_size,
        dtype=weights.fc.dtype,
        device=weights.fc.device,
    )


class Eagle3Head:
    """A `PairHead` in plain torch, for any device. Everything it knows of a sequence is in its KV pool."""

    def __init__(self, config: Eagle3Architecture, weights: Eagle3Weights, *, num_blocks: int, block_size: int) -> None:
        """`weights` as for `Eagle3Layer`."""
        layer = config.layer
        self.config = config
        self.target_ids = weights.target_ids
        self.kv_pool = head_pool(config, weights, num_blocks=num_blocks, block_size=block_size)
        heads = HeadLayout(layer.num_heads, layer.num_kv_heads, layer.head_size)
        # Nothing depends on a draft's last bits, so any tile will do.
        self._attention = TorchAttention(self.kv_pool, heads, window=None, tiles=Tiles((1, 8), 1, stable=False))
        self._layer = Eagle3Layer(config, weights, self._attention)

    @torch.inference_mode()
    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """See `PairHead.fuse`."""
        return self._layer.fuse(states)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PairHead.forward`."""
        self._attention.begin(batch, len(batch.token_ids))
        token_ids, positions, wanted = (
            to_device(numbers, hidden.device) for numbers in (batch.token_ids, batch.positions, batch.logit_rows)
        )
        return self._layer.pairs(token_ids, positions, hidden, wanted)
