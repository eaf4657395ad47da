"""Checkpoints that would load as garbage are refused: quantised ones by method and scheme, others by their tensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draft.eagle3_checkpoint import load_eagle3
from draft.medusa_heads import MedusaHeads
from target.checkpoint import load_weights
from target.errors import CheckpointError
from target.hf_config import read_config
from tests.draft.test_eagle3_checkpoint import FIXTURES, tables
from tests.tiny_folder import write_tiny_folder
from tests.tiny_medusa import tiny_tables, write_tiny_medusa

FP8_GROUP = {
    "weights": {"num_bits": 8, "type": "float"},
    "input_activations": {"num_bits": 8, "type": "float"},
}


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def add_tensors(folder: Path, **tensors: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | {name.replace("__", "."): tensor for name, tensor in tensors.items()}, path)


def load(folder: Path) -> None:
    list(load_weights(folder, read_config(folder), torch.float32).layers)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, "fp8 (activation_"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}, "awq (bits 4, group_size 128, "),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq (bits 4, group_size 128)"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "bitsandbytes (load_in_4bit True, bnb_4bit_quant_type"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": {"group_0": FP8_GROUP},
            },
            "compressed-tensors (format float-quantized, weights float8 input_activations float8)",
        ),
        ({"config_groups": {"a": {"weights": {"num_bits": 8, "type": "int"}}}}, "compressed-tensors (weights int8)"),
        ({"quant_method": "mxfp4"}, "mxfp4 (no scheme is named)"),
        ({"quant_method": "tomorrow's", "bits": 1}, "tomorrow's (bits 1)"),
    ],
)
def test_a_quantised_checkpoint_is_refused_by_method_and_scheme(
    config: dict[str, Any], named: str, tmp_path: Path
) -> None:
    """The error names file, field, method and scheme, and what to give instead; methods yet unknown are refused too."""
    folder = write_tiny_folder(tmp_path / "model")
    for field in ("quantization_config", "compression_config"):
        change_config(folder, **{"quantization_config": None, "compression_config": None, field: config})
        with pytest.raises(CheckpointError) as refused:
            read_config(folder)
        assert f"config.json: {field} is {named}" in str(refused.value)
        assert "Give the model's unquantised weights" in str(refused.value)
    change_config(folder, quantization_config=None, compression_config=None)
    load(folder)


def test_what_modelopt_says_beside_the_config_counts(tmp_path: Path) -> None:
    """NVIDIA's ModelOpt writes a file of its own; weights that it left alone are read."""
    folder = write_tiny_folder(tmp_path / "model")
    beside = folder / "hf_quant_config.json"
    beside.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4", "group_size": 16}}))
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json: quantization is modelopt \(quant_algo NVFP4"):
        read_config(folder)
    beside.write_text(json.dumps({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}))
    read_config(folder)
    beside.write_text("{")
    with pytest.raises(CheckpointError, match="not readable JSON"):
        read_config(folder)


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.int32])
def test_weights_of_another_type_are_refused(kind: torch.dtype, tmp_path: Path) -> None:
    """A matrix of integers or 8-bit floats, whatever the config says, is named with its type and the right ones."""
    folder = write_tiny_folder(tmp_path / "model")
    name = "model.layers.1.mlp.down_proj.weight"
    add_tensors(folder, **{name: load_file(folder / "model.safetensors")[name].to(kind)})
    with pytest.raises(CheckpointError, match=f"{name} is of type {str(kind)[6:]}; it must be bfloat16 or float16"):
        load(folder)


def test_every_tensor_is_read_known_or_named(tmp_path: Path) -> None:
    """Rotary tables and a tied head may be there; scales, biases and further layers, which nobody reads, are named."""
    folder = write_tiny_folder(tmp_path / "model")
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    add_tensors(
        folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4), lm_head__weight=embedding.clone()
    )
    load(folder)
    for name in (
        "model.layers.0.self_attn.q_proj.weight_scale",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.2.input_layernorm.weight",
        "model.layers.0.mlp.experts.0.up_proj.weight",
    ):
        other = shutil.copytree(folder, tmp_path / name)
        add_tensors(other, **{name: torch.ones(1)})
        with pytest.raises(
            CheckpointError, match=f"1 tensors have no place in the architecture of config.json: {name}"
        ):
            load(other)


def test_heads_are_checked_as_targets_are(tmp_path: Path) -> None:
    """An EAGLE-3 head and Medusa heads that are quantised, or hold tensors nobody reads, are refused by name."""

    def eagle(folder: Path) -> None:
        load_eagle3(folder, tables(), num_blocks=4, block_size=4, dtype=torch.float32, device=torch.device("cpu"))

    def medusa(folder: Path) -> None:
        MedusaHeads(folder, tiny_tables(), torch.float64, torch.device("cpu"))

    for name, read in (("eagle", eagle), ("medusa", medusa)):
        folder = tmp_path / name
        if read is eagle:
            shutil.copytree(FIXTURES / "eagle3_llama", folder)
            (folder / "expected.safetensors").unlink()
        else:
            write_tiny_medusa(folder)
        read(folder)
        change_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
        with pytest.raises(CheckpointError, match=r"quantization_config is gptq \(bits 4\)"):
            read(folder)
        change_config(folder, quantization_config=None)
        add_tensors(folder, extra__gate__weight=torch.ones(1))
        with pytest.raises(CheckpointError, match=r"1 tensors have no place .*extra\.gate\.weight"):
            read(folder)


def test_heads_of_another_type_are_refused(tmp_path: Path) -> None:
    """A head's matrix of bytes, which would be taken for numbers, is named with its type."""
    folder = write_tiny_medusa(tmp_path / "medusa")
    name = "0.0.linear.weight"
    add_tensors(folder, **{name: load_file(folder / "model.safetensors")[name].to(torch.uint8)})
    with pytest.raises(CheckpointError, match=f"{name} is of type uint8"):
        MedusaHeads(folder, tiny_tables(), torch.float64, torch.device("cpu"))
