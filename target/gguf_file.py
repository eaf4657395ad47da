"""Reading a GGUF file (llama.cpp's format) and converting it to a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, GGUFValueType
from gguf.quants import dequantize
from safetensors.numpy import save_file

from target.config import RopeScaling
from target.errors import CheckpointError, unreadable
from target.file_mode import apply_umask
from target.gguf_parts import gguf_parts
from target.rope_factors import llama3_scaling_of
from target.sampling_defaults import GENERATION_CONFIG, GGUF_NAMES, GGUF_PREFIX, gguf_sampling_fields

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
NO_TOKEN = 2**32 - 1
"""What llama.cpp writes for a token that a vocabulary does not have."""
TOKEN_ROLES = ("bos", "eos", "eot", "eom", "unknown", "padding")
"""Roles whose token a file may name, as `tokenizer.ggml.ROLE_token_id`."""
SHOWN_CHARACTERS = 60


class GGUFModel:
    """A GGUF model: its config and its weights under their Hugging Face names, dequantised one at a time."""

    def __init__(self, path: Path) -> None:
        """`path` is the file, or a part of a split one.

        Raises `CheckpointError` if a file is missing, truncated, of another model, or of an architecture we do not
        compute.
        """
        if not path.is_file():
            raise CheckpointError(f"{path} does not exist; a model is a Hugging Face folder or a .gguf file")
        parts = gguf_parts(path)
        self.path = parts[0]
        """The file with the metadata: the first part of a split one."""
        readers = [_reader_of(part) for part in parts]
        self._fields = readers[0].fields
        self._tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
        _check_parts(parts, readers, len(self._tensors))
        self._architecture = self._value("general.architecture")
        if not isinstance(self._architecture, str) or self._architecture not in ARCHITECTURES:
            supported = ", ".join(sorted(ARCHITECTURES))
            raise CheckpointError(
                f"{self.path}: general.architecture is {_shown(self._architecture)}; supported are {supported}"
            )

    def _value(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        try:
            return default if field is None else field.contents()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: {key} is not UTF-8 text ({error})") from error

    def _whole(self, key: str, default: int | None = None) -> int:
        """A positive whole number of the architecture. Raises `CheckpointError` if it is absent without a default."""
        name = f"{self._architecture}.{key}"
        value = self._value(name, default)
        if value is None:
            raise CheckpointError(f"{self.path} lacks {name}, which its architecture needs")
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self._error(name, value, "a positive whole number")
        return value

    def _real(self, key: str, default: float | None = None) -> float:
        """A positive number of the architecture. Raises `CheckpointError` if it is absent without a default."""
        name = f"{self._architecture}.{key}"
        value = self._value(name, default)
        if value is None:
            raise CheckpointError(f"{self.path} lacks {name}, which its architecture needs")
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self._error(name, value, "a positive number")
        return value

    def _token_id(self, key: str) -> int | None:
        """The id of a token with a role, `None` where no token has it."""
        name = f"tokenizer.ggml.{key}_token_id"
        value = self._value(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise self._error(name, value, "a token id")
        return value if value is None or 0 <= value < NO_TOKEN else None

    def _error(self, key: str, value: object, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {key} is {_shown(value)}; it must be {wanted}")

    def config(self) -> dict[str, Any]:
        """The content of the `config.json` this model would have."""
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None:
            raise CheckpointError(f"{self.path} lacks the tensor token_embd.weight")
        heads, hidden = self._whole("attention.head_count"), self._whole("embedding_length")
        return {
            "architectures": [ARCHITECTURES[self._architecture]],
            "model_type": self._architecture,
            "vocab_size": int(embedding.shape[-1]),
            "hidden_size": hidden,
            "intermediate_size": self._whole("feed_forward_length"),
            "num_hidden_layers": self._whole("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._whole("attention.head_count_kv", heads),
            "head_dim": self._whole("attention.key_length", hidden // heads),
            "max_position_embeddings": self._whole("context_length"),
            "rms_norm_eps": self._real("attention.layer_norm_rms_epsilon"),
            "hidden_act": "silu",
            "rope_parameters": self._rope(),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "bos_token_id": self._token_id("bos"),
            "eos_token_id": self.eos_token_ids(),
            "dtype": "float32",
        }

    def eos_token_ids(self) -> list[int]:
        """Ids of the tokens that end a text or a turn."""
        ids = [self._token_id(name) for name in ("eos", "eot", "eom")]
        return list(dict.fromkeys(token for token in ids if token is not None))

    def require_tokenizer(self) -> None:
        """Raises `CheckpointError` naming what the tokenizer lacks."""
        kind = self._value("tokenizer.ggml.model")
        needed = ("tokens", "merges") if kind == "gpt2" else ("tokens",)
        missing = [f"tokenizer.ggml.{key}" for key in ("model", *needed) if f"tokenizer.ggml.{key}" not in self._fields]
        if missing:
            raise CheckpointError(
                f"{self.path} lacks {' and '.join(missing)}: it has no tokenizer that can be used; convert the model "
                "again, with its tokenizer, or give its Hugging Face folder"
            )
        for key in needed:
            name = f"tokenizer.ggml.{key}"
            field = self._fields[name]
            if field.types[:1] + field.types[-1:] != [GGUFValueType.ARRAY, GGUFValueType.STRING] or not field.data:
                raise CheckpointError(f"{self.path}: {name} is no array of strings with at least one")
        num_tokens = len(self._fields["tokenizer.ggml.tokens"].data)
        for role in TOKEN_ROLES:
            token_id = self._token_id(role)
            if token_id is not None and token_id >= num_tokens:
                name = f"tokenizer.ggml.{role}_token_id"
                raise self._error(name, token_id, f"below {num_tokens}, the number of tokens")

    def sampling_fields(self) -> dict[str, Any]:
        """Fields of `generation_config.json` for the file's `general.sampling.*` keys."""
        keys = [GGUF_PREFIX + name for name in GGUF_NAMES]
        return gguf_sampling_fields({key: self._short(key) for key in keys})

    def _short(self, key: str) -> Any:
        """The value of a key, a 32-bit float as the shortest number that rounds to it (0.9, not 0.8999…)."""
        value = self._value(key)
        is_single = value is not None and self._fields[key].types == [GGUFValueType.FLOAT32]
        return float(str(np.float32(value))) if is_single else value

    def pre_tokenizer(self) -> str | None:
        """llama.cpp's name of the way text is split before merging."""
        name: str | None = self._value("tokenizer.ggml.pre")
        return name

    def _rope(self) -> dict[str, Any]:
        theta = self._real("rope.freq_base", 10000.0)
        kind = self._value(f"{self._architecture}.rope.scaling.type", "none")
        if kind != "none":
            raise CheckpointError(
                f"{self.path}: rope.scaling.type is {_shown(kind)}; only 'none' and rope_freqs are supported"
            )
        factors = self._tensors.get("rope_freqs.weight")
        if factors is None:
            return {"rope_type": "default", "rope_theta": theta}
        scaling: RopeScaling | None = llama3_scaling_of(np.asarray(factors.data, dtype=np.float32), theta)
        if scaling is None:
            raise CheckpointError(
                f"{self.path}: rope_freqs.weight is not the scaling of Llama 3; nothing else is supported"
            )
        return {"rope_type": "llama3", "rope_theta": theta} | {
            name: getattr(scaling, name) for name in RopeScaling.__struct_fields__
        }

    def tensors(self) -> Iterator[tuple[str, FloatArray]]:
        """Every weight with its Hugging Face name, as float32, which holds dequantised values exactly."""
        for tensor in self._tensors.values():
            if tensor.name in SKIPPED_NAMES:
                continue
            try:
                weight = dequantize(tensor.data, tensor.tensor_type).reshape(tuple(int(n) for n in tensor.shape[::-1]))
            except NotImplementedError as error:
                kind = tensor.tensor_type.name
                raise CheckpointError(f"{self.path}: {tensor.name} is of type {kind}, which cannot be read") from error
            yield (
                self._hugging_face_name(tensor.name),
                self._in_order(tensor.name, weight.astype(np.float32, copy=False)),
            )

    def _hugging_face_name(self, name: str) -> str:
        if name in OUTER_NAMES:
            return OUTER_NAMES[name]
        block, layer, stem, kind = (*name.split(".", 3), "", "", "")[:4]
        if block != "blk" or stem not in LAYER_NAMES:
            raise CheckpointError(f"{self.path}: the tensor {name} has no place in a {self._architecture} model")
        return f"model.layers.{layer}.{LAYER_NAMES[stem]}.{kind}"

    def _in_order(self, name: str, weight: FloatArray) -> FloatArray:
        """Undo llama.cpp's reordering: for `llama` it lays the two halves of a head's query and key rows in pairs."""
        if self._architecture != "llama" or not name.endswith((".attn_q.weight", ".attn_k.weight")):
            return weight
        heads = self._whole("attention.head_count")
        if ".attn_k." in name:
            heads = self._whole("attention.head_count_kv", heads)
        if weight.shape[0] % (2 * heads):
            raise CheckpointError(f"{self.path}: {name} has {weight.shape[0]} rows, which are not {heads} heads")
        pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))


def _reader_of(path: Path) -> GGUFReader:
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise CheckpointError(unreadable(path, "a GGUF file", error)) from error


def _check_parts(parts: Collection[Path], readers: Collection[GGUFReader], num_tensors: int) -> None:
    """Raises `CheckpointError` where files are not the parts of one model, or not all of them."""
    for number, (part, reader) in enumerate(zip(parts, readers, strict=True)):
        count, found = _split_value(reader, "split.count", 1), _split_value(reader, "split.no", 0)
        if count == 1 and len(parts) == 1:
            return
        if count != len(parts) and len(parts) == 1:
            raise CheckpointError(
                f"{part} is one of {_shown(count)} files of a split model; its name must be "
                f"NAME-{_padded(found, 1)}-of-{_padded(count)}.gguf for the others to be found"
            )
        if (count, found) != (len(parts), number):
            raise CheckpointError(
                f"{part}: split.no is {_shown(found)} and split.count {_shown(count)}; by its name they must be "
                f"{number} and {len(parts)}"
            )
    for part, reader in zip(parts, readers, strict=True):
        total = _split_value(reader, "split.tensors.count", num_tensors)
        if total != num_tensors:
            raise CheckpointError(
                f"{part}: split.tensors.count is {_shown(total)}, but the {len(parts)} files of the model hold "
                f"{num_tensors} tensors; they are not of one conversion, or one is damaged"
            )


def _split_value(reader: GGUFReader, key: str, default: int) -> object:
    field = reader.get_field(key)
    return default if field is None else field.contents()


def _padded(number: object, more: int = 0) -> str:
    """A number as in a part's name."""
    return f"{number + more:05}" if isinstance(number, int) else "?"


def _shown(value: object) -> str:
    """A value as an error shows it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"


def convert_gguf(path: Path, out_dir: Path, progress: Callable[[str], None]) -> None:
    """Write a GGUF model into `out_dir` as a Hugging Face folder: weights in float32, config, tokenizer.

    `path` is its file, or a part of a split one. Raises `CheckpointError` for what cannot be converted.
    """
    model = GGUFModel(path)
    model.require_tokenizer()
    config = model.config()
    out_dir.mkdir(parents=True, exist_ok=True)
    _write_json(out_dir / "config.json", config)
    _write_json(
        out_dir / GENERATION_CONFIG,
        {"bos_token_id": config["bos_token_id"], "eos_token_id": model.eos_token_ids(), **model.sampling_fields()},
    )
    progress(f"converting the weights of {path.name}")
    write_shards(model.tensors(), out_dir)
    progress(f"converting the tokenizer of {path.name}")
    _write_tokenizer(model.path, out_dir, model.pre_tokenizer())


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

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
    except Exception as error:  # the library raises whatever a file's contents make it raise
        raise CheckpointError(
            f"{path}: the tokenizer cannot be converted ({type(error).__name__}: {_shown(str(error))}); give the "
            "model's Hugging Face folder"
        ) from error
    if pre_tokenizer == "smollm":  # the conversion forgets that these models see digits one by one
        digits = Digits(individual_digits=True)
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence([digits, ByteLevel(add_prefix_space=False)])
    tokenizer.save_pretrained(str(out_dir))
