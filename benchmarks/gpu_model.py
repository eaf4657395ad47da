"""Models of random weights, for measurements that need a shape and no meaning."""

from __future__ import annotations

from typing import Any

import torch

from target.config import ModelConfig
from target.weights import LayerWeights, ModelWeights

LLAMA_8B = ModelConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
    max_model_len=8192,
    rope_theta=500000.0,
)
SMOLLM_135M = ModelConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_size=64,
    max_model_len=8192,
    rope_theta=1e5,
    tie_word_embeddings=True,
)
TINY = ModelConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_size=16,
    max_model_len=512,
)


def random_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    """Weights on the device, of a size that keeps activations near one."""
    generator = torch.Generator(device).manual_seed(0)

    def matrix(*shape: int) -> torch.Tensor:
        numbers = torch.empty(shape, dtype=dtype, device=device)
        return numbers.normal_(std=shape[-1] ** -0.5, generator=generator)

    def ones() -> torch.Tensor:
        return torch.ones(config.hidden_size, dtype=dtype, device=device)

    size, width = config.hidden_size, config.intermediate_size
    heads = config.num_heads * config.head_size
    embed = matrix(config.vocab_size, size)
    layers = [
        LayerWeights(
            input_norm=ones(),
            qkv=matrix(heads + 2 * config.num_kv_heads * config.head_size, size),
            qkv_bias=None,
            q_norm=None,
            k_norm=None,
            output=matrix(size, heads),
            post_norm=ones(),
            gate_up=matrix(2 * width, size),
            down=matrix(size, width),
        )
        for _ in range(config.num_layers)
    ]
    head = embed if config.tie_word_embeddings else matrix(config.vocab_size, size)
    return ModelWeights(embed=embed, layers=layers, norm=ones(), lm_head=head)


def step_bytes(config: ModelConfig, num_context_tokens: int, number_bytes: int, layer_bytes: int) -> int:
    """Bytes that a decoding step cannot but read: every matrix once, and the context's keys and values.

    `layer_bytes`: of a number of the layers' matrices, where others take `number_bytes`.
    """
    size, heads = config.hidden_size, config.num_heads * config.head_size
    kv = 2 * config.num_kv_heads * config.head_size
    layer = size * (heads + kv) + size * heads + 3 * size * config.intermediate_size
    others = config.num_layers * kv * num_context_tokens + config.vocab_size * size
    return config.num_layers * layer * layer_bytes + others * number_bytes


def transformers_model(config: ModelConfig, weights: ModelWeights) -> Any:
    """transformers' own model over the same tensors."""
    import transformers

    shape = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_size,
        max_position_embeddings=config.max_model_len,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=None,
    )
    device, dtype = weights.embed.device, weights.embed.dtype
    with device:
        model = transformers.LlamaForCausalLM(shape).to(dtype).eval()
    heads, kv = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    state = {"model.embed_tokens.weight": weights.embed, "model.norm.weight": weights.norm}
    state["lm_head.weight"] = weights.lm_head
    for i, layer in enumerate(weights.layers):
        q, k, v = layer.qkv.split([heads, kv, kv])
        gate, up = layer.gate_up.chunk(2)
        named = {
            "input_layernorm": layer.input_norm,
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": layer.output,
            "post_attention_layernorm": layer.post_norm,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down,
        }
        state |= {f"model.layers.{i}.{name}.weight": tensor for name, tensor in named.items()}
    model.load_state_dict(state, assign=True)
    return model
