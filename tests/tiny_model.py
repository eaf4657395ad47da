"""Random models of a few thousand weights, for tests that need real arithmetic and no meaning."""

from __future__ import annotations

import torch

from target.config import ModelConfig
from target.torch_runner import TorchRunner
from target.weights import LayerWeights, ModelWeights

TINY = ModelConfig(
    vocab_size=61,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    max_model_len=256,
    tie_word_embeddings=True,
    eos_token_ids=(60,),
)


def tiny_weights(config: ModelConfig = TINY, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> ModelWeights:
    """Random weights, large enough that tokens differ."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).div(shape[-1] ** 0.5).mul(1.5).to(dtype)

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=dtype)

    size, width, heads = config.hidden_size, config.intermediate_size, config.num_heads * config.head_size
    kv = 2 * config.num_kv_heads * config.head_size
    layers = [
        LayerWeights(
            input_norm=ones(size),
            qkv=matrix(heads + kv, size),
            qkv_bias=None,
            q_norm=None,
            k_norm=None,
            output=matrix(size, heads),
            post_norm=ones(size),
            gate_up=matrix(2 * width, size),
            down=matrix(size, width),
        )
        for _ in range(config.num_layers)
    ]
    embed = matrix(config.vocab_size, size)
    return ModelWeights(embed=embed, layers=layers, norm=ones(size), lm_head=embed)


def tiny_runner(
    config: ModelConfig = TINY,
    *,
    seed: int = 0,
    num_blocks: int = 64,
    block_size: int = 4,
    dtype: torch.dtype = torch.float64,
) -> TorchRunner:
    """A torch runner over `tiny_weights`."""
    return TorchRunner(
        config,
        tiny_weights(config, seed=seed, dtype=dtype),
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=config.max_model_len,
        device=torch.device("cpu"),
    )
