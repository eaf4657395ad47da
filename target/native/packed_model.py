"""A model's weights as the native step reads them: matrices in panels, vectors in float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from target.config import ModelConfig
from target.native.gguf_blocks import Q4_1, Q8_0, GGUFBlocks
from target.native.packing import Bytes, Floats, interleave_gate_up, pack, pack_q4_blocks, pack_q8_blocks
from target.native.tiles import FLOAT, Q4, Q8
from target.weights import LayerWeights, ModelWeights

KIND_NAMES = {Q4: "Q4_1 x int8", Q8: "Q8_0 x int16", FLOAT: "float32"}


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """One layer, in the order a step reads it; the names are those of `target.native.records.LAYER`."""

    input_norm: Floats
    qkv: Bytes
    qkv_bias: Floats | None
    q_norm: Floats | None
    k_norm: Floats | None
    output: Bytes
    post_norm: Floats
    gate_up: Bytes
    down: Bytes


@dataclass(frozen=True, slots=True)
class PackedModel:
    """A whole decoder. `layers` is read once: each is packed when it is asked for, so that few exist at a time."""

    body_kind: int
    head_kind: int
    layers: Iterator[PackedLayer]
    norm: Floats
    embed: Bytes
    head: Bytes
    """The same array as `embed` where they are tied."""


def pack_weights(weights: ModelWeights, quantization: str) -> PackedModel:
    """Pack float weights, quantised to `int8` or `q4` (the head and the embedding to int8 in either case), or not."""
    body, head = {"int8": (Q8, Q8), "q4": (Q4, Q8), "none": (FLOAT, FLOAT)}[quantization]
    embed = pack(_floats(weights.embed), head)
    return PackedModel(
        body_kind=body,
        head_kind=head,
        layers=(_pack_layer(layer, body) for layer in weights.layers),
        norm=_floats(weights.norm),
        embed=embed,
        head=embed if weights.lm_head is weights.embed else pack(_floats(weights.lm_head), head),
    )


def _pack_layer(layer: LayerWeights, kind: int) -> PackedLayer:
    def optional(tensor: torch.Tensor | None) -> Floats | None:
        return None if tensor is None else _floats(tensor)

    return PackedLayer(
        input_norm=_floats(layer.input_norm),
        qkv=pack(_floats(layer.qkv), kind),
        qkv_bias=optional(layer.qkv_bias),
        q_norm=optional(layer.q_norm),
        k_norm=optional(layer.k_norm),
        output=pack(_floats(layer.output), kind),
        post_norm=_floats(layer.post_norm),
        gate_up=pack(interleave_gate_up(_floats(layer.gate_up)), kind),
        down=pack(_floats(layer.down), kind),
    )


def _floats(tensor: torch.Tensor) -> Floats:
    return tensor.detach().to(torch.float32).contiguous().numpy()


def holds_q4(path: Path) -> bool:
    """Whether a GGUF file has the types `pack_gguf` reads: Q4_1 in the layers, Q8_0 for embedding and head."""
    blocks = GGUFBlocks(path)
    names = [f"blk.0.{name}.weight" for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_down")]
    head = blocks.kind("output.weight")
    return (
        all(blocks.kind(name) == Q4_1 for name in names)
        and blocks.kind("token_embd.weight") == Q8_0
        and head in {None, Q8_0}
    )


def pack_gguf(path: Path, config: ModelConfig) -> PackedModel:
    """Pack a GGUF file's own quantised groups, bit for bit, with as many layers as `config` has.

    Raises `CheckpointError` where a tensor is absent or of another type or shape.
    """
    blocks = GGUFBlocks(path)
    shape = (config.vocab_size, config.hidden_size)
    embed = pack_q8_blocks(blocks.blocks("token_embd.weight", Q8_0, shape))
    tied = config.tie_word_embeddings
    return PackedModel(
        body_kind=Q4,
        head_kind=Q8,
        layers=_read_layers(blocks, config),
        norm=blocks.floats("output_norm.weight", config.hidden_size),
        embed=embed,
        head=embed if tied else pack_q8_blocks(blocks.blocks("output.weight", Q8_0, shape)),
    )


def _read_layers(blocks: GGUFBlocks, config: ModelConfig) -> Iterator[PackedLayer]:
    """Every layer; behind the last one `CheckpointError` where the file holds tensors that nobody read."""
    for i in range(config.num_layers):
        yield _read_layer(blocks, config, f"blk.{i}.")
    blocks.require_all_read()


def _read_layer(blocks: GGUFBlocks, config: ModelConfig, prefix: str) -> PackedLayer:
    hidden, width, size = config.hidden_size, config.intermediate_size, config.head_size
    parts = (("attn_q", config.num_heads), ("attn_k", config.num_kv_heads), ("attn_v", config.num_kv_heads))

    def matrix(name: str, outputs: int, inputs: int) -> Bytes:
        return blocks.blocks(f"{prefix}{name}.weight", Q4_1, (outputs, inputs))

    def vector(name: str, length: int) -> Floats:
        return blocks.floats(f"{prefix}{name}", length)

    paired = blocks.architecture == "llama"
    qkv = [_in_order(matrix(name, heads * size, hidden), heads, paired and name != "attn_v") for name, heads in parts]
    gate_up = [matrix("ffn_gate", width, hidden), matrix("ffn_up", width, hidden)]
    bias = None
    if config.qkv_bias:
        biases = [_in_order(vector(f"{name}.bias", n * size), n, paired and name != "attn_v") for name, n in parts]
        bias = np.concatenate(biases)
    return PackedLayer(
        input_norm=vector("attn_norm.weight", hidden),
        qkv=pack_q4_blocks(np.concatenate(qkv)),
        qkv_bias=bias,
        q_norm=vector("attn_q_norm.weight", size) if config.qk_norm else None,
        k_norm=vector("attn_k_norm.weight", size) if config.qk_norm else None,
        output=pack_q4_blocks(matrix("attn_output", hidden, config.num_heads * size)),
        post_norm=vector("ffn_norm.weight", hidden),
        gate_up=pack_q4_blocks(interleave_gate_up(np.concatenate(gate_up))),
        down=pack_q4_blocks(matrix("ffn_down", hidden, width)),
    )


def _in_order(rows: npt.NDArray[Any], num_heads: int, paired: bool) -> npt.NDArray[Any]:
    """Undo llama.cpp's order of a head's query and key rows, in which the halves' rows alternate."""
    if not paired:
        return rows
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2)
    return np.ascontiguousarray(pairs).reshape(rows.shape)
