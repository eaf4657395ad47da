"""The tiny random model as a Hugging Face folder, with a tokenizer of one word a token."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from target.config import ModelConfig
from target.weights import ModelWeights
from tests.tiny_model import TINY, tiny_weights


def write_tiny_folder(folder: Path, config: ModelConfig = TINY, weights: ModelWeights | None = None) -> Path:
    """Words `w0`, `w1`, …; the last one ends a text. Without a chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = weights or tiny_weights(config, dtype=torch.float32)
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in tensors_of(config, weights).items()},
        folder / "model.safetensors",
    )
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "max_position_embeddings": config.max_model_len,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_id": list(config.eos_token_ids),
    }
    (folder / "config.json").write_text(json.dumps(fields))
    words = {f"w{i}": i for i in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def tensors_of(config: ModelConfig, weights: ModelWeights) -> dict[str, torch.Tensor]:
    """The weights under the names of a Llama checkpoint."""
    queries, keys = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    tensors = {"model.embed_tokens.weight": weights.embed, "model.norm.weight": weights.norm}
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = weights.lm_head
    for i, layer in enumerate(weights.layers):
        prefix = f"model.layers.{i}."
        qkv = layer.qkv.split([queries, keys, keys])
        gate, up = layer.gate_up.chunk(2)
        tensors |= {f"{prefix}self_attn.{n}_proj.weight": part for n, part in zip("qkv", qkv, strict=True)}
        tensors |= {
            prefix + "self_attn.o_proj.weight": layer.output,
            prefix + "mlp.gate_proj.weight": gate,
            prefix + "mlp.up_proj.weight": up,
            prefix + "mlp.down_proj.weight": layer.down,
            prefix + "input_layernorm.weight": layer.input_norm,
            prefix + "post_attention_layernorm.weight": layer.post_norm,
        }
    return tensors
