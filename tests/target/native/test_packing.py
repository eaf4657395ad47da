"""Panels hold the weights they were packed from, and GGUF blocks pass through bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter

from target.config import ModelConfig
from target.errors import CheckpointError
from target.native.gguf_blocks import Q4_1, GGUFBlocks
from target.native.packed_model import holds_q4, pack_gguf
from target.native.packing import (
    dequantise,
    interleave_gate_up,
    pack,
    pack_q4_blocks,
    pack_q8_blocks,
    quantise_q4,
    quantise_q8,
)
from target.native.tiles import FLOAT, Q4, Q8

CONFIG = ModelConfig(
    vocab_size=50,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=32,
    max_model_len=256,
)


def weight(outputs: int, inputs: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(outputs, inputs)).astype(np.float32)


def test_quantising_keeps_weights_within_half_a_step() -> None:
    """8 bits are within 1/254 of a group's largest weight, 4 bits within 1/30 of its range, float16 scales included."""
    w = weight(20, 96)
    groups = w.reshape(20, 3, 32)
    eight = np.abs(dequantise(quantise_q8(w)) - w).reshape(groups.shape).max(-1)
    four = np.abs(dequantise(quantise_q4(w)) - w).reshape(groups.shape).max(-1)
    assert (eight <= np.abs(groups).max(-1) / 254 * 1.1).all()
    assert (four <= (groups.max(-1) - groups.min(-1)) / 30 * 1.1).all()


def test_a_group_of_equal_weights_survives() -> None:
    """Groups without range, of zeros and of a constant, come back as they were."""
    w = np.zeros((16, 64), np.float32)
    w[:, 32:] = 0.5
    assert (dequantise(quantise_q4(w)) == w).all()
    assert (dequantise(quantise_q8(np.zeros((16, 32), np.float32))) == 0).all()


def test_a_float_panel_is_the_transposed_weight() -> None:
    """Channel c of panel p is row 16 p + c; missing rows are zeros."""
    w = weight(20, 64)
    panels = pack(w, FLOAT).view(np.float32).reshape(2, 64, 16)
    assert (panels[1, :, 3] == w[19]).all()
    assert (panels[1, :, 4:] == 0).all()


def test_quantised_panels_hold_every_byte_of_their_blocks() -> None:
    """Sorted, the bytes of a panel are those of its blocks."""
    w = weight(32, 64)
    for kind, quantise in ((Q4, quantise_q4), (Q8, quantise_q8)):
        packed, blocks = pack(w, kind), quantise(w)
        assert (np.sort(packed[1].ravel()) == np.sort(blocks[16:].ravel())).all()


def test_gate_and_up_alternate_in_groups_of_32() -> None:
    """32 rows of the gate, the 32 of the up projection for the same channels, and so on."""
    order = interleave_gate_up(np.arange(192))
    assert order.tolist() == [
        *range(32),
        *range(96, 128),
        *range(32, 64),
        *range(128, 160),
        *range(64, 96),
        *range(160, 192),
    ]


def in_pairs(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order of query and key rows."""
    return rows.reshape(num_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path: Path, matrices: dict[str, np.ndarray], head: np.ndarray, *, kind: GGMLQuantizationType) -> None:
    """A file of the `llama` architecture with a tokenizer to skip."""
    writer = GGUFWriter(path, "llama")
    writer.add_token_list([f"token {i}" for i in range(50)])
    writer.add_token_scores([0.5] * 50)
    writer.add_tensor("token_embd.weight", head, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.add_tensor("output.weight", head[::-1].copy(), raw_dtype=GGMLQuantizationType.Q8_0)
    writer.add_tensor("output_norm.weight", np.arange(64, dtype=np.float32))
    for i in range(2):
        for name, blocks in matrices.items():
            writer.add_tensor(f"blk.{i}.{name}.weight", blocks, raw_dtype=kind)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{name}.weight", np.full(64, i, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


SHAPES = {
    "attn_q": (128, 64),
    "attn_k": (64, 64),
    "attn_v": (64, 64),
    "attn_output": (64, 128),
    "ffn_gate": (96, 64),
    "ffn_up": (96, 64),
    "ffn_down": (64, 96),
}


def flat(blocks: np.ndarray) -> np.ndarray:
    """Rows of bytes, as the writer wants them."""
    return blocks.reshape(len(blocks), -1)


def test_gguf_blocks_are_taken_bit_for_bit(tmp_path: Path) -> None:
    """Queries and keys return to the order of halves, and no scale or nibble is computed anew."""
    blocks = {name: quantise_q4(weight(*shape, seed=i)) for i, (name, shape) in enumerate(SHAPES.items())}
    stored = dict(blocks) | {"attn_q": in_pairs(blocks["attn_q"], 4), "attn_k": in_pairs(blocks["attn_k"], 2)}
    head = quantise_q8(weight(50, 64, seed=9))
    path = tmp_path / "model.gguf"
    write_gguf(path, {name: flat(b) for name, b in stored.items()}, flat(head), kind=GGMLQuantizationType.Q4_1)
    assert holds_q4(path)
    packed = pack_gguf(path, CONFIG)
    layers = list(packed.layers)
    assert (layers[1].qkv == pack_q4_blocks(np.concatenate([blocks[f"attn_{part}"] for part in "qkv"]))).all()
    assert (layers[0].output == pack_q4_blocks(blocks["attn_output"])).all()
    assert (layers[0].down == pack_q4_blocks(blocks["ffn_down"])).all()
    gate_up = interleave_gate_up(np.concatenate([blocks["ffn_gate"], blocks["ffn_up"]]))
    assert (layers[0].gate_up == pack_q4_blocks(gate_up)).all()
    assert (packed.embed == pack_q8_blocks(head)).all()
    assert (packed.head == pack_q8_blocks(head[::-1])).all()
    assert (layers[1].input_norm == 1).all()
    assert (packed.norm == np.arange(64)).all()


def test_tensors_that_nobody_reads_are_named(tmp_path: Path) -> None:
    """A GGUF file with one matrix more in each layer is refused by its names: it is a model of another architecture."""
    blocks = {name: flat(quantise_q4(weight(*shape))) for name, shape in (SHAPES | {"attn_gate": (64, 64)}).items()}
    path = tmp_path / "model.gguf"
    write_gguf(path, blocks, flat(quantise_q8(weight(50, 64))), kind=GGMLQuantizationType.Q4_1)
    names = r"2 tensors have no place .*: blk\.0\.attn_gate\.weight, blk\.1\.attn_gate\.weight;"
    with pytest.raises(CheckpointError, match=names):
        list(pack_gguf(path, CONFIG).layers)


def test_other_types_are_not_taken_for_q4(tmp_path: Path) -> None:
    """A file whose layers are Q8_0 is declined, and reading it as Q4_1 names tensor and type."""
    blocks = {name: flat(quantise_q8(weight(*shape))) for name, shape in SHAPES.items()}
    path = tmp_path / "model.gguf"
    write_gguf(path, blocks, flat(quantise_q8(weight(50, 64))), kind=GGMLQuantizationType.Q8_0)
    assert not holds_q4(path)
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.weight is \[128, 64\] of type 8; it must be .* Q4_1"):
        list(pack_gguf(path, CONFIG).layers)


@pytest.mark.parametrize("keep", [10, 700, -6000])
def test_a_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    """A file that ends in its header or in its tensors gives an error with its path."""
    path = tmp_path / "model.gguf"
    blocks = {name: flat(quantise_q4(weight(*shape))) for name, shape in SHAPES.items()}
    write_gguf(path, blocks, flat(quantise_q8(weight(50, 64))), kind=GGMLQuantizationType.Q4_1)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=str(path)):
        GGUFBlocks(path).blocks("blk.1.ffn_down.weight", Q4_1, (64, 96))
