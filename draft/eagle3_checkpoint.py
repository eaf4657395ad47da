"""EAGLE-3 heads on disk: the `speculators` format, and the layout of the authors' own checkpoints (`midlayer.*`).

A head may leave out `embed_tokens` and `lm_head`: they are the target's then. `d2t` [C] holds offsets: the target's id
of draft token i is `i + d2t[i]`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from draft.eagle3_head import Eagle3Architecture, Eagle3Head, Eagle3Weights, FeatureNorm, PairHead
from draft.eagle3_native import NativeEagle3Head, native_head_obstacle
from draft.head_checkpoint import HeadTensors, TargetTables
from target.config import ModelConfig
from target.errors import CheckpointError
from target.hf_config import parse_config, read_json
from target.quantized_checkpoint import refuse_quantized

LLAMA_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "vocab_size": 32000,
}
QWEN3_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_attention_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
}
DEFAULTS: dict[str, dict[str, Any]] = {"llama": LLAMA_DEFAULTS, "qwen3": QWEN3_DEFAULTS}
"""What configs written as a difference leave out, by `model_type`."""
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}

EAGLE3_UNUSED = (
    "t2d",
    "*.rotary_emb.inv_freq",
    "rotary_emb.inv_freq",
    "verifier_norm.weight",
    "verifier_lm_head.weight",
)
"""Tensors that need not be read: which of the target's tokens are drafted, as d2t says too, what can be computed, and
what is the target's own."""

logger = logging.getLogger(__name__)


def load_eagle3(
    folder: Path,
    tables: TargetTables,
    *,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    shift_layers: int = 0,
    is_native: bool = False,
    uses_triton: bool = False,
    cache_dir: Path | None = None,
) -> PairHead:
    """The head in `folder` for the target of `tables`.

    `is_native` asks for the native head, which keeps 8-bit weights and its machine code in `cache_dir`, where this
    processor and this head allow it; `uses_triton`, on CUDA, for Triton's kernels and captured steps. `shift_layers` is
    added to the layers it says it reads: checkpoints differ in whether they count the embedding.
    Raises `CheckpointError`, naming the field or tensor, for what is missing or does not fit the target.
    """
    config = read_eagle3_config(folder, tables.config, shift_layers=shift_layers)
    weights = read_eagle3_weights(folder, config, tables, dtype, device)
    if is_native:
        obstacle = native_head_obstacle(config, block_size)
        if obstacle is None:
            # One thread: a head is so small that two would wait for one another longer than they compute.
            return NativeEagle3Head(
                config,
                weights,
                num_blocks=num_blocks,
                block_size=block_size,
                num_threads=1,
                cache_dir=cache_dir,
                progress=logger.info,
            )
        logger.info("%s: computed in plain torch: %s", folder, obstacle)
    if uses_triton:
        # Triton comes with builds of torch for CUDA, and nobody else waits for it.
        from draft.eagle3_graphed import GraphedEagle3Head
        from target.triton.attention import DTYPES

        if dtype in DTYPES:
            return GraphedEagle3Head(config, weights, num_blocks=num_blocks, block_size=block_size)
    return Eagle3Head(config, weights, num_blocks=num_blocks, block_size=block_size)


def read_eagle3_config(folder: Path, target: ModelConfig, *, shift_layers: int = 0) -> Eagle3Architecture:
    """The architecture in a head's config.json, checked against its target's."""
    path = folder / "config.json"
    fields = read_json(path)
    kind = fields.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise CheckpointError(f"{path}: speculators_model_type is {kind!r}; it must be 'eagle3'")
    refuse_quantized(path, fields)
    _warn_of_lossy(path, fields)
    layer = _layer(path, fields.get("transformer_layer_config", fields))
    for name in ("hidden_size", "vocab_size"):
        if getattr(layer, name) != getattr(target, name):
            raise CheckpointError(
                f"{path}: {name} is {getattr(layer, name)}, the target's is {getattr(target, name)}; "
                "this head belongs to another model"
            )
    other = fields.get("target_hidden_size")
    if other not in {None, target.hidden_size}:
        raise CheckpointError(f"{path}: target_hidden_size is {other}; the target's is {target.hidden_size}")
    draft_vocab_size = fields.get("draft_vocab_size") or layer.vocab_size
    return Eagle3Architecture(
        layer=layer,
        feature_layers=_feature_layers(path, fields, target.num_layers, shift_layers),
        draft_vocab_size=int(draft_vocab_size),
        norm_before_residual=bool(fields.get("norm_before_residual", False)),
        feature_norm=_feature_norm(fields),
        norm_output=bool(fields.get("norm_output", False)),
    )


def read_eagle3_weights(
    folder: Path, config: Eagle3Architecture, tables: TargetTables, dtype: torch.dtype, device: torch.device
) -> Eagle3Weights:
    """The head's weights in `dtype` on `device`, sorted by the target's ids; the embedding stays as it is stored."""
    tensors = HeadTensors(folder)
    layer, size = config.layer, config.layer.hidden_size
    prefix = "midlayer." if "midlayer.hidden_norm.weight" in tensors else "layers.0."
    queries, keys = layer.num_heads * layer.head_size, layer.num_kv_heads * layer.head_size
    num_features = len(config.feature_layers)

    def one(name: str, *shape: int) -> torch.Tensor:
        return tensors.take(f"{name}.weight", shape).to(device, dtype, copy=True)

    def stacked(parts: dict[str, int], inputs: int) -> torch.Tensor:
        return torch.cat([one(f"{prefix}{name}", rows, inputs) for name, rows in parts.items()])

    def feature_norm() -> torch.Tensor | None:
        if config.feature_norm == "each":
            return torch.cat([one(f"fc_norm.{i}", size) for i in range(num_features)])
        return one("input_norm", num_features * size) if config.feature_norm == "all" else None

    target_ids = _target_ids(tensors, config)
    tensors.ignore(EAGLE3_UNUSED)
    order = target_ids.argsort()
    embed, rows = tables.embed, tables.lm_head[target_ids]
    if "embed_tokens.weight" in tensors:
        embed = tensors.take("embed_tokens.weight", (layer.vocab_size, size))
    if "lm_head.weight" in tensors:
        rows = tensors.take("lm_head.weight", tuple(rows.shape))
    width = layer.intermediate_size
    weights = Eagle3Weights(
        fc=one("fc", size, num_features * size),
        feature_norm=feature_norm(),
        input_norm=one(prefix + "input_layernorm", size),
        hidden_norm=one(prefix + "hidden_norm", size),
        qkv=stacked({"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}, 2 * size),
        q_norm=one(prefix + "self_attn.q_norm", layer.head_size) if layer.qk_norm else None,
        k_norm=one(prefix + "self_attn.k_norm", layer.head_size) if layer.qk_norm else None,
        output=one(prefix + "self_attn.o_proj", size, queries),
        post_norm=one(prefix + "post_attention_layernorm", size),
        gate_up=stacked({"mlp.gate_proj": width, "mlp.up_proj": width}, size),
        down=one(prefix + "mlp.down_proj", size, width),
        norm=one("norm", size),
        lm_head=rows[order].to(device, dtype),
        target_ids=target_ids[order].to(device),
        embed=embed.to(device) if device.type != "cpu" else embed,
    )
    tensors.require_all_taken()
    return weights


def _layer(path: Path, fields: dict[str, Any]) -> ModelConfig:
    """The decoder layer of a head, as a model of one layer."""
    kind = str(fields.get("model_type", "llama")).removesuffix("_eagle3")
    if kind not in DEFAULTS:
        raise CheckpointError(f"{path}: model_type is {kind!r}; it must be one of {', '.join(map(repr, DEFAULTS))}")
    whole = DEFAULTS[kind] | {name: value for name, value in fields.items() if value is not None}
    num_layers = whole.get("num_hidden_layers", 1)
    if num_layers != 1:
        raise CheckpointError(f"{path}: num_hidden_layers is {num_layers}; a head must have 1")
    whole |= {"architectures": [ARCHITECTURES[kind]], "num_hidden_layers": 1, "sliding_window": None}
    return parse_config(path, whole)


def _feature_layers(path: Path, fields: dict[str, Any], num_layers: int, shift: int) -> tuple[int, ...]:
    """Null means the layers of the EAGLE-3 paper's code: one near the bottom, the middle, one near the top."""
    ids = fields.get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        ids = (fields.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    layers = tuple(int(i) + shift for i in (ids or (2, num_layers // 2, num_layers - 3)))
    if not all(0 <= layer <= num_layers for layer in layers) or len(set(layers)) < len(layers):
        raise CheckpointError(
            f"{path}: eagle_aux_hidden_state_layer_ids is {ids} (shifted by {shift}); the target has layers 0 to "
            f"{num_layers}, and each may be named once"
        )
    return layers


def _feature_norm(fields: dict[str, Any]) -> FeatureNorm:
    if fields.get("fc_norm"):
        return "each"
    return "all" if fields.get("norm_before_fc") else "none"


def _target_ids(tensors: HeadTensors, config: Eagle3Architecture) -> torch.Tensor:
    """[C] the target's id of each draft token."""
    size, vocab_size = config.draft_vocab_size, config.layer.vocab_size
    if "d2t" not in tensors:
        if size != vocab_size:
            raise CheckpointError(
                f"{tensors.folder}: draft_vocab_size is {size} of {vocab_size}, but no d2t says which they are"
            )
        return torch.arange(size)
    ids = torch.arange(size) + tensors.take("d2t", (size,)).long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(ids.unique()) < size:
        raise CheckpointError(
            f"{tensors.folder}: d2t does not map to {size} different ids below {vocab_size}; it must hold offsets, "
            "the target's id less the draft's"
        )
    return ids


def _warn_of_lossy(path: Path, fields: dict[str, Any]) -> None:
    """Settings of other engines that would change the target's answers have no effect here."""
    methods = (fields.get("speculators_config") or {}).get("proposal_methods") or []
    for method in methods:
        for name, harmless in (("verifier_accept_k", 1), ("accept_tolerance", 0.0)):
            if (method.get(name) or harmless) > harmless:
                logger.warning(
                    "%s: %s is %s, which would change answers; it is ignored, only what the target says is accepted",
                    path,
                    name,
                    method[name],
                )
