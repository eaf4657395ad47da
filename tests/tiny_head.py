"""Random heads for the tiny model, for tests that need real arithmetic and no meaning."""

from __future__ import annotations

import msgspec
import torch

from draft.eagle3_head import Eagle3Architecture, Eagle3Head, Eagle3Weights, FeatureNorm
from target.config import ModelConfig
from tests.tiny_model import TINY, tiny_weights


def tiny_architecture(
    config: ModelConfig = TINY,
    *,
    feature_norm: FeatureNorm = "none",
    norm_before_residual: bool = False,
    norm_output: bool = False,
    qk_norm: bool = False,
) -> Eagle3Architecture:
    return Eagle3Architecture(
        layer=msgspec.structs.replace(config, num_layers=1, qk_norm=qk_norm),
        feature_layers=(0, 1, 2),
        draft_vocab_size=40,
        norm_before_residual=norm_before_residual,
        feature_norm=feature_norm,
        norm_output=norm_output,
    )


def tiny_head_weights(
    architecture: Eagle3Architecture, *, seed: int = 1, dtype: torch.dtype = torch.float64
) -> Eagle3Weights:
    """Random weights; embedding and output rows are those of `tiny_weights`."""
    generator = torch.Generator().manual_seed(seed)
    layer = architecture.layer

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).div(shape[-1] ** 0.5).mul(1.5).to(dtype)

    def vector(size: int) -> torch.Tensor:
        return (1 + 0.1 * torch.randn(size, generator=generator, dtype=torch.float64)).to(dtype)

    size, heads = layer.hidden_size, layer.num_heads * layer.head_size
    num_features = len(architecture.feature_layers) * size
    target_ids = torch.randperm(layer.vocab_size, generator=generator)[: architecture.draft_vocab_size].sort().values
    embed = tiny_weights(msgspec.structs.replace(layer, num_layers=TINY.num_layers), dtype=dtype).embed
    return Eagle3Weights(
        fc=matrix(size, num_features),
        feature_norm=None if architecture.feature_norm == "none" else vector(num_features),
        input_norm=vector(size),
        hidden_norm=vector(size),
        qkv=matrix(heads + 2 * layer.num_kv_heads * layer.head_size, 2 * size),
        q_norm=vector(layer.head_size) if layer.qk_norm else None,
        k_norm=vector(layer.head_size) if layer.qk_norm else None,
        output=matrix(size, heads),
        post_norm=vector(size),
        gate_up=matrix(2 * layer.intermediate_size, size),
        down=matrix(size, layer.intermediate_size),
        norm=vector(size),
        lm_head=embed[target_ids].clone(),
        target_ids=target_ids,
        embed=embed,
    )


def tiny_head(
    architecture: Eagle3Architecture | None = None,
    *,
    seed: int = 1,
    num_blocks: int = 64,
    block_size: int = 4,
    dtype: torch.dtype = torch.float64,
) -> Eagle3Head:
    """A head over `tiny_head_weights`."""
    architecture = architecture or tiny_architecture()
    weights = tiny_head_weights(architecture, seed=seed, dtype=dtype)
    return Eagle3Head(architecture, weights, num_blocks=num_blocks, block_size=block_size)
