"""A GGUF file says what a Hugging Face folder of the same model says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFValueType, GGUFWriter
from safetensors.torch import load_file

from target.errors import CheckpointError
from target.gguf_file import LAYER_NAMES, OUTER_NAMES, GGUFModel, write_shards
from target.hf_config import read_config
from target.load import load_runner
from tests.target.conftest import make_model
from tests.target.forwards import in_chunks, tokens

Fields = dict[str, tuple[Any, GGUFValueType] | None]
"""Keys of a GGUF file with their values and types; None for a key that is left out."""

GGUF_NAMES = {hugging_face: name for name, hugging_face in OUTER_NAMES.items()}
GGUF_LAYER_NAMES = {hugging_face: name for name, hugging_face in LAYER_NAMES.items()}


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor."""
    if name in GGUF_NAMES:
        return GGUF_NAMES[name]
    _, _, layer, *stem, kind = name.split(".")
    return f"blk.{layer}.{GGUF_LAYER_NAMES['.'.join(stem)]}.{kind}"


def in_pairs(weight: Any, heads: int) -> Any:
    """llama.cpp's order of a head's rows: row i of the first half, then row i of the second."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    model: Any,
    architecture: str,
    *,
    fields: Fields | None = None,
    split_max_tensors: int = 0,
    **extra: Any,
) -> None:
    """Write a model as llama.cpp's converter does.

    `fields`: further keys, or other values for those written here; None leaves a key out. `extra`: further tensors.
    """
    config = model.config
    writer = GGUFWriter(path, architecture, split_max_tensors=split_max_tensors)
    values: Fields = {
        f"{architecture}.block_count": (config.num_hidden_layers, GGUFValueType.UINT32),
        f"{architecture}.context_length": (config.max_position_embeddings, GGUFValueType.UINT32),
        f"{architecture}.embedding_length": (config.hidden_size, GGUFValueType.UINT32),
        f"{architecture}.feed_forward_length": (config.intermediate_size, GGUFValueType.UINT32),
        f"{architecture}.attention.head_count": (config.num_attention_heads, GGUFValueType.UINT32),
        f"{architecture}.attention.head_count_kv": (config.num_key_value_heads, GGUFValueType.UINT32),
        f"{architecture}.attention.key_length": (config.head_dim, GGUFValueType.UINT32),
        f"{architecture}.attention.layer_norm_rms_epsilon": (config.rms_norm_eps, GGUFValueType.FLOAT32),
        f"{architecture}.rope.freq_base": (config.rope_parameters["rope_theta"], GGUFValueType.FLOAT32),
        "tokenizer.ggml.eos_token_id": (2, GGUFValueType.UINT32),
    }
    for key, found in (values | (fields or {})).items():
        if found is not None:
            value, kind = found
            element = GGUFValueType.get_type(value[0]) if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(key, value, kind, element)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weight = tensor.numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            weight = in_pairs(weight, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(weight))
    for name, array in extra.items():
        writer.add_tensor(name.replace("__", "."), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(("family", "architecture"), [("llama", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")])
def test_gguf_weights_and_config_are_those_of_the_folder(family: str, architecture: str, tmp_path: Path) -> None:
    """Config and every weight, llama.cpp's reordering undone, equal those of the folder of the same model."""
    model = make_model(family, head_dim=16)
    model.save_pretrained(tmp_path / "folder")
    write_gguf(tmp_path / "model.gguf", model, architecture)
    source = GGUFModel(tmp_path / "model.gguf")
    converted = tmp_path / "converted"
    converted.mkdir()
    write_shards(source.tensors(), converted, shard_bytes=30_000)
    (converted / "config.json").write_text(json.dumps(source.config()))
    assert len(list(converted.glob("*.safetensors"))) > 1
    expected = {
        name: tensor for path in (tmp_path / "folder").glob("*.safetensors") for name, tensor in load_file(path).items()
    }
    found = {name: tensor for path in converted.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    config, reference = read_config(converted), read_config(tmp_path / "folder")
    assert {n for n in config.__struct_fields__ if getattr(config, n) != getattr(reference, n)} <= {
        "bos_token_id",
        "eos_token_ids",
        "rms_norm_eps",  # float32 in the file
    }
    ids = tokens(20, seed=1)
    results = [
        in_chunks(load_runner(f, num_blocks=4, backend="torch"), ids, 20, [1, 2])
        for f in (converted, tmp_path / "folder")
    ]
    assert torch.allclose(results[0], results[1], atol=1e-5)


def test_the_frequency_divisors_of_llama_3_are_recognised(tmp_path: Path) -> None:
    """`rope_freqs.weight` of a Llama 3 becomes the llama3 scaling; other divisors are refused."""
    model = make_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    frequencies = 500000.0 ** -(np.arange(8) / 8)
    wavelengths = 2 * np.pi / frequencies
    blend = np.clip((8192 / wavelengths - 1) / 3, 0, 1)
    divisors = (1 / ((1 - blend) / 32 + blend)).astype(np.float32)
    write_gguf(tmp_path / "model.gguf", model, "llama", rope_freqs__weight=divisors)
    rope = GGUFModel(tmp_path / "model.gguf").config()["rope_parameters"]
    assert rope == {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    write_gguf(tmp_path / "other.gguf", model, "llama", rope_freqs__weight=divisors[::-1].copy())
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight is not the scaling of Llama 3"):
        GGUFModel(tmp_path / "other.gguf").config()


def test_gguf_files_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    """A missing, a truncated, a foreign and an unsupported file each have their own message."""
    with pytest.raises(CheckpointError, match="does not exist"):
        GGUFModel(tmp_path / "missing.gguf")
    path = tmp_path / "model.gguf"
    write_gguf(path, make_model("llama"), "llama")
    content = path.read_bytes()
    for cut in (10, 300, len(content) - 50):
        path.write_bytes(content[:cut])
        with pytest.raises(CheckpointError, match="is truncated or not a GGUF file"):
            GGUFModel(path)
    write_gguf(path, make_model("llama"), "gpt2")
    with pytest.raises(CheckpointError, match=r"general\.architecture is 'gpt2'; supported are llama, qwen2, qwen3"):
        GGUFModel(path)
    write_gguf(path, make_model("llama"), "llama", blk__0__attn_gate__weight=np.zeros((2, 2), np.float32))
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_gate\.weight has no place in a llama model"):
        list(GGUFModel(path).tensors())


def test_the_embedded_model_is_its_gguf_exactly(embedded_folder: Path) -> None:
    """Every weight of the converted model is the dequantised one, bit for bit, in float32."""
    found = load_file(embedded_folder / "model.safetensors")
    source = dict(GGUFModel(embedded_folder / "model.gguf").tensors())
    assert found.keys() == source.keys()
    assert all(np.array_equal(found[name].numpy(), weight) for name, weight in source.items())
    assert found["model.embed_tokens.weight"].dtype == torch.float32
