"""Reading a GGUF file (llama.cpp's format) and converting it to a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import save_file

from target.config import RopeScaling
from target.errors import CheckpointError
from target.file_mode import apply_umask
from target.rope_factors import llama3_scaling_of

FloatArray = npt.NDArray[np.float32]

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""`general.architecture` to the Hugging Face class. Mistral calls itself llama in GGUF."""

OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SKIPPED_NAMES = {"rope_freqs.weight"}
"""Read as part of the config."""

SHARD_BYTES = 4 << 30


class GGUFModel:
    """A GGUF file: its config and its weights under their Hugging Face names, dequantised one at a time."""

    def __init__(self, path: Path) -> None:
        """Raises `CheckpointError` if the file is missing, truncated, or of an architecture we do not compute."""
        self._path = path
        if not path.is_file():
            raise CheckpointError(f"{path} does not exist; a model is a Hugging Face folder or a .gguf file")
        try:
            self._reader = GGUFReader(path)
        except (ValueError, IndexError, KeyError, OverflowError) as error:
            raise CheckpointError(f"{path} is truncated or not a GGUF file ({error}); fetch it again") from error
        self._architecture = self._value("general.architecture")
        if self._architecture not in ARCHITECTURES:
            supported = ", ".join(sorted(ARCHITECTURES))
            raise CheckpointError(f"{path}: general.architecture is {self._architecture!r}; supported are {supported}")

    def _value(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def _number(self, key: str, default: float | None = None) -> Any:
        """An architecture's own number. Raises `CheckpointError` if it is absent and has no default."""
        value = self._value(f"{self._architecture}.{key}", default)
        if value is None:
            raise CheckpointError(f"{self._path} lacks {self._architecture}.{key}, which its architecture needs")
        return value

    def _tensor(self, name: str) -> Any:
        return next((tensor for tensor in self._reader.tensors if tensor.name == name), None)

    def config(self) -> dict[str, Any]:
        """The content of the `config.json` this model would have."""
        embedding = self._tensor("token_embd.weight")
        if embedding is None:
            raise CheckpointError(f"{self._path} lacks the tensor token_embd.weight")
        heads, hidden = self._number("attention.head_count"), self._number("embedding_length")
        return {
            "architectures": [ARCHITECTURES[self._architecture]],
            "model_type": self._architecture,
            "vocab_size": int(embedding.shape[1]),
            "hidden_size": hidden,
            "intermediate_size": self._number("feed_forward_length"),
            "num_hidden_layers": self._number("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._number("attention.head_count_kv", heads),
            "head_dim": self._number("attention.key_length", hidden // heads),
            "max_position_embeddings": self._number("context_length"),
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "hidden_act": "silu",
            "rope_parameters": self._rope(),
            "tie_word_embeddings": self._tensor("output.weight") is None,
            "bos_token_id": self._value("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.eos_token_ids(),
            "dtype": "float32",
        }

    def eos_token_ids(self) -> list[int]:
        """Ids of the tokens that end a text or a turn."""
        ids = [self._value(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        return list(dict.fromkeys(token for token in ids if token is not None))

    def pre_tokenizer(self) -> str | None:
        """llama.cpp's name of the way text is split before merging."""
        name: str | None = self._value("tokenizer.ggml.pre")
        return name

    def _rope(self) -> dict[str, Any]:
        theta = self._number("rope.freq_base", 10000.0)
        kind = self._value(f"{self._architecture}.rope.scaling.type", "none")
        if kind != "none":
            raise CheckpointError(
                f"{self._path}: rope.scaling.type is {kind!r}; only 'none' and rope_freqs are supported"
            )
        factors = self._tensor("rope_freqs.weight")
        if factors is None:
            return {"rope_type": "default", "rope_theta": theta}
        scaling: RopeScaling | None = llama3_scaling_of(np.asarray(factors.data, dtype=np.float32), theta)
        if scaling is None:
            raise CheckpointError(
                f"{self._path}: rope_freqs.weight is not the scaling of Llama 3; nothing else is supported"
            )
        return {"rope_type": "llama3", "rope_theta": theta} | {
            name: getattr(scaling, name) for name in RopeScaling.__struct_fields__
        }

    def tensors(self) -> Iterator[tuple[str, FloatArray]]:
        """Every weight with its Hugging Face name, as float32, which holds dequantised values exactly."""
        for tensor in self._reader.tensors:
            if tensor.name in SKIPPED_NAMES:
                continue
            try:
                weight = dequantize(tensor.data, tensor.tensor_type).reshape(tuple(int(n) for n in tensor.shape[::-1]))
            except NotImplementedError as error:
                kind = tensor.tensor_type.name
                raise CheckpointError(f"{self._path}: {tensor.name} is of type {kind}, which cannot be read") from error
            yield (
                self._hugging_face_name(tensor.name),
                self._in_order(tensor.name, weight.astype(np.float32, copy=False)),
            )

    def _hugging_face_name(self, name: str) -> str:
        if name in OUTER_NAMES:
            return OUTER_NAMES[name]
        block, layer, *rest = name.split(".", 2)
        stem, _, kind = rest[0].partition(".") if rest else ("", "", "")
        if block != "blk" or stem not in LAYER_NAMES:
            raise CheckpointError(f"{self._path}: the tensor {name} has no place in a {self._architecture} model")
        return f"model.layers.{layer}.{LAYER_NAMES[stem]}.{kind}"

    def _in_order(self, name: str, weight: FloatArray) -> FloatArray:
        """Undo llama.cpp's reordering: for `llama` it lays the two halves of a head's query and key rows in pairs."""
        if self._architecture != "llama" or not name.endswith((".attn_q.weight", ".attn_k.weight")):
            return weight
        heads = self._number("attention.head_count")
        if ".attn_k." in name:
            heads = self._number("attention.head_count_kv", heads)
        pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))


def convert_gguf(path: Path, out_dir: Path, progress: Callable[[str], None]) -> None:
    """Write the model of a GGUF file into `out_dir` as a Hugging Face folder: weights in float32, config, tokenizer.

    Raises `CheckpointError` for a file that cannot be converted.
    """
    model = GGUFModel(path)
    config = model.config()
    out_dir.mkdir(parents=True, exist_ok=True)
    _write_json(out_dir / "config.json", config)
    _write_json(
        out_dir / "generation_config.json",
        {"bos_token_id": config["bos_token_id"], "eos_token_id": model.eos_token_ids()},
    )
    progress(f"converting the weights of {path.name}")
    write_shards(model.tensors(), out_dir)
    progress(f"converting the tokenizer of {path.name}")
    _write_tokenizer(path, out_dir, model.pre_tokenizer())


def write_shards(tensors: Iterator[tuple[str, FloatArray]], out_dir: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write tensors as one safetensors file, or as several of about `shard_bytes` with an index."""
    shards: list[list[str]] = []
    held: dict[str, FloatArray] = {}

    def flush() -> None:
        save_file(held, out_dir / f"part-{len(shards)}", metadata={"format": "pt"})
        apply_umask(out_dir / f"part-{len(shards)}")
        shards.append(list(held))
        held.clear()

    for name, tensor in tensors:
        held[name] = tensor
        if sum(kept.nbytes for kept in held.values()) >= shard_bytes:
            flush()
    if held or not shards:
        flush()
    if len(shards) == 1:
        (out_dir / "part-0").rename(out_dir / "model.safetensors")
        return
    places = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        (out_dir / f"part-{i}").rename(out_dir / file)
        places.update(dict.fromkeys(names, file))
    _write_json(out_dir / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_tokenizer(path: Path, out_dir: Path, pre_tokenizer: str | None) -> None:
    """Convert the file's tokenizer and chat template, by way of transformers (about five seconds)."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
    if pre_tokenizer == "smollm":  # the conversion forgets that these models see digits one by one
        digits = Digits(individual_digits=True)
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence([digits, ByteLevel(add_prefix_space=False)])
    tokenizer.save_pretrained(str(out_dir))
