"""Checkpoints that are not what they should be, and what the errors say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from target.checkpoint import truncate_checkpoint
from target.digests import write_manifest
from target.errors import CheckpointError
from target.gguf_file import GGUFModel
from target.load import load_runner
from tests.target.conftest import SaveModel
from tests.target.forwards import in_chunks, tokens


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def load_error(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_runner(folder, num_blocks=2, backend="torch")
    return str(caught.value)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architectures is ['GPT2LMHeadModel']; it must be one of LlamaForCausalLM",
        ),
        ({"hidden_size": "48"}, "hidden_size is '48'; it must be a positive whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be a positive whole number"),
        ({"num_key_value_heads": 4}, "num_key_value_heads is 4; it must be a divisor of num_attention_heads (6)"),
        ({"head_dim": None, "hidden_size": 50}, "hidden_size is 50; it must be a multiple of num_attention_heads (6)"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; it must be 'silu'"),
        ({"mlp_bias": True}, "mlp_bias is True; it must be false"),
        ({"attention_bias": True}, "attention_bias is True; it must be false"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'; supported are 'default' and 'llama3'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "lacks a number for low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; it must be 1.0"),
    ],
)
def test_a_config_that_cannot_be_computed_names_the_field(
    fields: dict[str, Any], wanted: str, save_model: SaveModel
) -> None:
    """The error of a wrong config names the file, the field, its value and what would fit."""
    folder, _ = save_model("llama")
    change_config(folder, **fields)
    message = load_error(folder)
    assert wanted in message
    assert str(folder / "config.json") in message


def test_windows_on_some_layers_are_refused(save_model: SaveModel) -> None:
    """A model whose layers differ in their window is refused, not computed wrongly."""
    folder, _ = save_model("mistral")
    change_config(folder, layer_types=["full_attention", "sliding_attention"])
    assert "layer_types" in load_error(folder)


def test_a_missing_folder_and_a_missing_file_are_told(tmp_path: Path, save_model: SaveModel) -> None:
    """No folder, no weights, other weights, and a shard that is gone each have their own message."""
    assert "config.json does not exist" in load_error(tmp_path / "nowhere")
    folder, _ = save_model("llama", max_shard_size="60KB")
    shard = sorted(folder.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.unlink()
    assert f"{shard} is missing" in load_error(folder)
    shard.write_bytes(content)
    (folder / "model.safetensors.index.json").rename(folder / "pytorch_model.bin")
    assert "pytorch_model.bin" in load_error(folder)


def test_a_truncated_file_is_told(save_model: SaveModel) -> None:
    """A safetensors file that was cut short is named, and what to do."""
    folder, _ = save_model("llama")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert f"{path} is truncated" in load_error(folder)
    path.write_bytes(b"not at all")
    assert f"{path} is truncated" in load_error(folder)


def test_broken_json_is_told(save_model: SaveModel) -> None:
    """A config that is no JSON object is named."""
    folder, _ = save_model("llama")
    (folder / "config.json").write_text("{")
    assert "not readable JSON" in load_error(folder)
    (folder / "config.json").write_text("[]")
    assert "must hold a JSON object" in load_error(folder)


def test_tensors_that_do_not_fit_are_named(save_model: SaveModel) -> None:
    """A missing and a misshapen tensor are named, with both shapes."""
    folder, _ = save_model("llama")
    path, name = folder / "model.safetensors", "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(path)
    save_file(tensors | {name: torch.zeros(48, 79)}, path)
    assert f"{name} has shape [48, 79]; config.json asks for [48, 80]" in load_error(folder)
    del tensors[name]
    save_file(tensors, path)
    assert f"no file holds the tensor {name}" in load_error(folder)


def test_a_truncated_model_is_its_first_layers(tmp_path: Path, save_model: SaveModel) -> None:
    """`truncate_checkpoint` writes a folder that transformers too loads, with the source's first layers.

    The digests kept beside the source are of other files, and stay behind.
    """
    source, model = save_model("qwen3", max_shard_size="60KB")
    write_manifest(source)
    truncate_checkpoint(source, tmp_path / "poor", 1)
    reference: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "poor", dtype=torch.float32).eval()
    ids = tokens(12, seed=1)
    ours = in_chunks(load_runner(tmp_path / "poor", num_blocks=2, backend="torch"), ids, 12, [1])
    with torch.inference_mode():
        assert (ours - reference(torch.tensor([ids])).logits[0]).abs().max() < 1e-3
    assert torch.equal(reference.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight)
    assert len(reference.model.layers) == 1


@pytest.mark.parametrize("layers", [0, 3])
def test_only_layers_there_are_can_be_kept(layers: int, tmp_path: Path, save_model: SaveModel) -> None:
    """Keeping none or more layers than there are is an error that says how many there are."""
    folder, _ = save_model("llama")
    with pytest.raises(ValueError, match="layers to keep 1 to 2"):
        truncate_checkpoint(folder, tmp_path / "poor", layers)


@pytest.mark.parametrize(
    ("argument", "value", "wanted"),
    [
        ("device", "tpu9", "device is 'tpu9'; it must be 'auto', 'cpu' or 'cuda'"),
        ("dtype", "int8", "dtype is 'int8'; it must be 'auto', 'float64'"),
        ("backend", "abacus", "backend is 'abacus'; it must be"),
        ("backend", "triton", "backend is 'triton'; it must be 'auto', 'torch' or 'native' on device 'cpu'"),
        ("max_model_len", 4096, "max_model_len is 4096; the model has positions for 1 to 1024"),
    ],
)
def test_arguments_that_cannot_be_are_told(argument: str, value: Any, wanted: str, save_model: SaveModel) -> None:
    """A device, precision, backend or length that does not exist is named with those that do."""
    folder, _ = save_model("llama")
    with pytest.raises(ValueError, match=r"it must be|positions") as caught:
        load_runner(folder, num_blocks=2, **{argument: value})
    assert wanted in str(caught.value)


def test_a_git_lfs_pointer_is_told_from_a_damaged_file(save_model: SaveModel) -> None:
    """A clone without Git LFS has a small text in place of the weights; the error says what fetches them."""
    folder, _ = save_model("llama")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    (folder / "model.safetensors").write_text(pointer)
    assert "model.safetensors is a Git LFS pointer, not a safetensors file; run `git lfs pull`" in load_error(folder)
    (folder / "model.gguf").write_text(pointer)
    with pytest.raises(CheckpointError, match=r"model\.gguf is a Git LFS pointer, not a GGUF file"):
        GGUFModel(folder / "model.gguf")


@pytest.mark.parametrize("place", [3, None, ["model.safetensors"]])
def test_an_index_that_names_no_file_is_refused(save_model: SaveModel, place: object) -> None:
    """Where the index maps a tensor to something else than a file's name, it is named."""
    folder, _ = save_model("llama")
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": place}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model.safetensors.index.json: weight_map is {'model.norm" in load_error(folder)
