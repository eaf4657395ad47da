"""Writing trained heads: a folder in the `speculators` format, with a record of how it was made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from draft.eagle3_head import Eagle3Architecture
from draft.head_checkpoint import SCALE
from target.file_mode import apply_umask

FORMAT_VERSION = "0.9.0"
"""Of the `speculators` package whose format is written."""
STORAGES = ("float32", "float16", "int8")


def write_eagle3(
    folder: Path,
    architecture: Eagle3Architecture,
    tensors: Mapping[str, torch.Tensor],
    target_ids: torch.Tensor,
    lm_head: torch.Tensor | None,
    *,
    target_name: str,
    storage: str,
) -> None:
    """Write a head. `tensors` by checkpoint name; `target_ids` [C] ascending, `lm_head` [C, E].

    Without `lm_head` the folder is smaller, and a reader has to take the target's output rows, as forerun does. `int8`
    is a scale a row beside each matrix, which is forerun's own as well.
    """
    folder.mkdir(parents=True, exist_ok=True)
    num_draft = len(target_ids)
    known = torch.zeros(architecture.layer.vocab_size, dtype=torch.bool)
    known[target_ids] = True
    stored: dict[str, torch.Tensor] = {"t2d": known, "d2t": target_ids - torch.arange(num_draft)}
    for name, tensor in {**tensors, **({} if lm_head is None else {"lm_head.weight": lm_head})}.items():
        stored |= _stored(name, tensor, storage)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    apply_umask(folder / "model.safetensors")
    fields = _eagle3_fields(architecture, num_draft, target_name, "float16" if storage == "float16" else "float32")
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def write_medusa(
    folder: Path, tensors: Mapping[str, torch.Tensor], num_heads: int, *, target_name: str, storage: str
) -> None:
    """Write heads of one residual block in the layout of Medusa's authors."""
    folder.mkdir(parents=True, exist_ok=True)
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        stored |= _stored(name, tensor, storage)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    apply_umask(folder / "model.safetensors")
    fields = {"medusa_num_heads": num_heads, "medusa_num_layers": 1, "base_model_name_or_path": target_name}
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """How the weights in `folder` were made, with their SHA-256, as training.json."""
    with (folder / "model.safetensors").open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    text = json.dumps({**record, "model.safetensors": digest}, indent=2)
    (folder / "training.json").write_text(text + "\n", encoding="utf-8")


def _stored(name: str, tensor: torch.Tensor, storage: str) -> dict[str, torch.Tensor]:
    """A tensor as it is written; vectors are few and stay exact."""
    if tensor.dim() < 2 or storage == "float32":
        return {name: tensor.float()}
    if storage == "float16":
        return {name: tensor.half()}
    scale = (tensor.float().abs().amax(dim=1) / 127).clamp(min=1e-12)
    return {name: (tensor.float() / scale[:, None]).round().to(torch.int8), name + SCALE: scale}


def _eagle3_fields(architecture: Eagle3Architecture, num_draft: int, target_name: str, dtype: str) -> dict[str, Any]:
    layer = architecture.layer
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": layer.rope_theta}
    if layer.rope_scaling is not None:
        scaling = layer.rope_scaling
        rope |= {"rope_type": "llama3"} | {name: getattr(scaling, name) for name in scaling.__struct_fields__}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": FORMAT_VERSION,
        "draft_vocab_size": num_draft,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(architecture.feature_layers),
        "norm_before_residual": architecture.norm_before_residual,
        "norm_before_fc": architecture.feature_norm == "all",
        "fc_norm": architecture.feature_norm == "each",
        "norm_output": architecture.norm_output,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "transformer_layer_config": {
            "model_type": "qwen3" if layer.qk_norm else "llama",
            "vocab_size": layer.vocab_size,
            "hidden_size": layer.hidden_size,
            "intermediate_size": layer.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": layer.num_heads,
            "num_key_value_heads": layer.num_kv_heads,
            "head_dim": layer.head_size,
            "max_position_embeddings": layer.max_model_len,
            "rms_norm_eps": layer.rms_norm_eps,
            "rope_parameters": rope,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
        },
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 4, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "verifier": {"name_or_path": target_name, "architectures": ["LlamaForCausalLM"]},
        },
    }
