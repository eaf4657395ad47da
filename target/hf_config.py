"""Reading `config.json` and `generation_config.json` of a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from target.config import ModelConfig, RopeScaling
from target.errors import CheckpointError
from target.quantized_checkpoint import refuse_quantized

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Architectures this decoder computes, and the `model_type` each has."""


def read_config(model_dir: Path) -> ModelConfig:
    """The architecture of the model in `model_dir`.

    Understands transformers 5 (`rope_parameters`) and 4 (`rope_theta`, `rope_scaling`).
    Raises `CheckpointError` naming the file, the field, its value and what would fit.
    """
    path = model_dir / "config.json"
    return _ConfigReader(path, read_json(path)).config(_generation_eos(model_dir) + _tokenizer_eos(model_dir))


def parse_config(path: Path, fields: dict[str, Any]) -> ModelConfig:
    """As `read_config`, of an architecture's `fields` that were found in `path`, named in errors."""
    return _ConfigReader(path, fields).config(())


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises `CheckpointError` where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; a model folder holds config.json and *.safetensors") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}; it must hold a JSON object")
    return content


def _generation_eos(model_dir: Path) -> tuple[int, ...]:
    """Stop tokens of `generation_config.json`: instruction-tuned models name their end of turn there only."""
    path = model_dir / "generation_config.json"
    return _stop_ids(path, read_json(path)) if path.exists() else ()


def _tokenizer_eos(model_dir: Path) -> tuple[int, ...]:
    """The `eos_token` of `tokenizer_config.json`, else of `special_tokens_map.json`, which older tokenizers have.

    Some fine-tunes name their end of turn there only.
    Contents of another shape than transformers writes name no token, and raise nothing.
    """
    fields = _tokenizer_file(model_dir / "tokenizer_config.json")
    token = fields.get("eos_token") or _tokenizer_file(model_dir / "special_tokens_map.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str) or not text:
        return ()
    listed = fields.get("added_tokens_decoder") or _tokenizer_file(model_dir / "tokenizer.json").get("added_tokens")
    return tuple(token_id for token_id, content in _added_tokens(listed) if content == text)


def _tokenizer_file(path: Path) -> dict[str, Any]:
    """The fields of a tokenizer's file; empty where there is no object in it."""
    try:
        return read_json(path)
    except CheckpointError:
        return {}


def _added_tokens(listed: object) -> Iterator[tuple[int, object]]:
    """Ids and contents of added tokens, listed as in `tokenizer_config.json` (by id) or `tokenizer.json`."""
    if isinstance(listed, dict):
        listed = [{**token, "id": int(key)} for key, token in listed.items() if _is_id(key) and isinstance(token, dict)]
    for token in listed if isinstance(listed, list) else ():
        if isinstance(token, dict) and isinstance(token.get("id"), int):
            yield token["id"], token.get("content")


def _is_id(key: str) -> bool:
    return key.isascii() and key.isdecimal()


def _stop_ids(path: Path, fields: dict[str, Any]) -> tuple[int, ...]:
    """`eos_token_id`: absent, one number or a list of them, of which negative ones name no token.

    Raises `CheckpointError` for anything else.
    """
    value = fields.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
        raise CheckpointError(f"{path}: eos_token_id is {value!r}; it must be a token id, a list of them, or null")
    return tuple(token_id for token_id in ids if token_id >= 0)


class _ConfigReader:
    """One `config.json`, field by field, with errors that name the field."""

    def __init__(self, path: Path, fields: dict[str, Any]) -> None:
        self._path = path
        self._fields = fields

    def config(self, generation_eos: tuple[int, ...]) -> ModelConfig:
        refuse_quantized(self._path, self._fields)
        family = self._family()
        hidden, heads = self._positive("hidden_size"), self._positive("num_attention_heads")
        kv_heads = self._positive("num_key_value_heads", heads)
        if heads % kv_heads:
            raise self._error("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
        head_size = self._positive("head_dim", hidden // heads)
        if self._fields.get("head_dim") is None and hidden % heads:
            raise self._error("hidden_size", f"a multiple of num_attention_heads ({heads})")
        rope = self._rope()
        eos = dict.fromkeys(generation_eos + _stop_ids(self._path, self._fields))
        return ModelConfig(
            vocab_size=self._positive("vocab_size"),
            hidden_size=hidden,
            intermediate_size=self._positive("intermediate_size"),
            num_layers=self._positive("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_size=head_size,
            max_model_len=self._positive("max_position_embeddings"),
            rms_norm_eps=self._real(self._fields, "rms_norm_eps", 1e-6),
            rope_theta=self._real(rope, "rope_theta", 10000.0),
            rope_scaling=self._rope_scaling(rope),
            tie_word_embeddings=bool(self._fields.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            sliding_window=self._sliding_window(family),
            bos_token_id=self._bos(),
            eos_token_ids=tuple(eos),
        )

    def _error(self, name: str, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {name} is {self._fields.get(name)!r}; it must be {wanted}")

    def _positive(self, name: str, default: int | None = None) -> int:
        """A field that is a positive whole number; `default` where it is absent or null."""
        value = self._fields.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self._error(name, "a positive whole number")
        return value

    def _real(self, fields: dict[str, Any], name: str, default: float) -> float:
        """A positive number among `fields`, which are the file's or an object in it; `default` where it is absent."""
        value = fields.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise CheckpointError(f"{self._path}: {name} is {value!r}; it must be a positive number")
        return float(value)

    def _bos(self) -> int | None:
        """The first token of a text; None where the file names none."""
        value = self._fields.get("bos_token_id")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self._error("bos_token_id", "a token id or null")
        return value

    def _family(self) -> str:
        """Which of `FAMILIES` this is; refuses what the decoder would compute wrongly."""
        names = self._fields.get("architectures") or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self._error("architectures", f"a list with one of {', '.join(FAMILIES)}")
        family = next((FAMILIES[name] for name in names if name in FAMILIES), None)
        if family is None and not names and self._fields.get("model_type") in FAMILIES.values():
            family = str(self._fields["model_type"])
        if family is None:
            raise self._error("architectures", f"one of {', '.join(FAMILIES)}")
        if self._fields.get("hidden_act", "silu") != "silu":
            raise self._error("hidden_act", "'silu'")
        if self._fields.get("mlp_bias"):
            raise self._error("mlp_bias", "false")
        if family != "qwen2" and self._fields.get("attention_bias"):
            raise self._error("attention_bias", "false (a bias behind the attention's output is not supported)")
        return family

    def _rope(self) -> dict[str, Any]:
        """Rotary parameters in the shape of transformers 5, whichever version wrote the file."""
        rope = self._fields.get("rope_parameters")
        if rope is None:
            scaling = self._fields.get("rope_scaling") or {}
            if not isinstance(scaling, dict):
                raise self._error("rope_scaling", "an object or null")
            rope = {"rope_theta": self._fields.get("rope_theta")} | scaling
        if not isinstance(rope, dict):
            raise self._error("rope_parameters", "an object")
        if self._fields.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0)) != 1.0:
            raise self._error("partial_rotary_factor", "1.0")
        return rope

    def _rope_scaling(self, rope: dict[str, Any]) -> RopeScaling | None:
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default":
            return None
        if kind != "llama3":
            raise CheckpointError(f"{self._path}: rope_type is {kind!r}; supported are 'default' and 'llama3'")
        missing = [name for name in RopeScaling.__struct_fields__ if not isinstance(rope.get(name), (int, float))]
        if missing:
            raise CheckpointError(f"{self._path}: the llama3 rotary scaling lacks a number for {', '.join(missing)}")
        values = {name: self._real(rope, name, 1.0) for name in RopeScaling.__struct_fields__}
        return RopeScaling(
            factor=values["factor"],
            low_freq_factor=values["low_freq_factor"],
            high_freq_factor=values["high_freq_factor"],
            original_max_position_embeddings=int(values["original_max_position_embeddings"]),
        )

    def _sliding_window(self, family: str) -> int | None:
        """The window, where every layer has it."""
        window: int | None = self._fields.get("sliding_window")
        if window is None or (family.startswith("qwen") and not self._fields.get("use_sliding_window", False)):
            return None
        if family == "llama":
            return None
        kinds = self._fields.get("layer_types") or ["sliding_attention"]
        if not isinstance(kinds, list):
            raise self._error("layer_types", "a list with the same for every layer")
        if family.startswith("qwen") and "layer_types" not in self._fields and self._fields.get("max_window_layers"):
            raise self._error("max_window_layers", "0: windows on some layers only are not supported")
        if kinds == ["full_attention"] * len(kinds):
            return None
        if kinds != ["sliding_attention"] * len(kinds):
            raise self._error("layer_types", "a list with the same for every layer")
        return self._positive("sliding_window")
