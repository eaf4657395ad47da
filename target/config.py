"""The architecture of a decoder of the Llama family, as plain numbers."""

from __future__ import annotations

import msgspec


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """The frequency scaling of Llama 3.1 (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One decoder: Llama, Mistral, Qwen2, Qwen3 or SmolLM, told apart by their numbers and not by their names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_model_len: int
    """Positions the model was made for."""
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    """A token sees this many of the newest tokens, itself among them; None sees all."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
