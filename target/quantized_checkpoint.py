"""Refusing checkpoints whose stored numbers are not the weights: quantised by a scheme that is not read here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from target.errors import CheckpointError

CONFIG_FIELDS = ("quantization_config", "compression_config")
MODELOPT_FILE = "hf_quant_config.json"
"""File beside config.json in which NVIDIA's ModelOpt describes its quantization."""
SCHEME_FIELDS = (
    "fmt",
    "format",
    "quant_algo",
    "bits",
    "num_bits",
    "w_bit",
    "group_size",
    "activation_scheme",
    "weight_block_size",
    "load_in_8bit",
    "load_in_4bit",
    "bnb_4bit_quant_type",
    "quant_type",
    "weights",
    "version",
)
"""Fields of the various methods that say how weights are stored, named in the error."""
WHAT_FITS = (
    "such weights are not read. Give the model's unquantised weights (float32, bfloat16 or float16), which "
    "`quantization` can quantise when they are loaded (int8 or q4 on a CPU, fp8 on CUDA), or a GGUF file of it"
)


def refuse_quantized(path: Path, fields: dict[str, Any]) -> None:
    """Raises `CheckpointError`, naming method and scheme, where `fields` of the config.json at `path` say quantised."""
    for name in CONFIG_FIELDS:
        if fields.get(name):
            raise CheckpointError(f"{path}: {name} is {_method_and_scheme(fields[name])}; {WHAT_FITS}")
    beside = path.parent / MODELOPT_FILE
    if not beside.is_file():
        return
    try:
        content = json.loads(beside.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{beside} is not readable JSON: {error}") from error
    quantization = content.get("quantization") if isinstance(content, dict) else content
    if not isinstance(quantization, dict) or quantization.get("quant_algo") is not None:
        raise CheckpointError(f"{beside}: quantization is {_method_and_scheme(quantization, 'modelopt')}; {WHAT_FITS}")


def _method_and_scheme(config: Any, method: str | None = None) -> str:
    """Words for an error, such as "gptq (bits 4, group_size 128)"."""
    if not isinstance(config, dict):
        return repr(config)[:200]
    method = str(config.get("quant_method") or method or _implied_method(config))
    scheme = [f"{name} {_short(config[name])}" for name in SCHEME_FIELDS if _says(config.get(name))]
    groups = config.get("config_groups")
    if isinstance(groups, dict):
        scheme += sorted({_group(group) for group in groups.values() if isinstance(group, dict)})
    return f"{method} ({', '.join(scheme) or 'no scheme is named'})"


def _says(value: Any) -> bool:
    return value is not None and value is not False and value != ""


def _implied_method(config: dict[str, Any]) -> str:
    """Old configs of bitsandbytes and of compressed-tensors name no method."""
    if "load_in_8bit" in config or "load_in_4bit" in config:
        return "bitsandbytes"
    return "compressed-tensors" if "config_groups" in config else "an unnamed method"


def _group(group: dict[str, Any]) -> str:
    """A scheme of compressed-tensors: bits and type of weights and of what they are multiplied with."""
    parts = []
    for name in ("weights", "input_activations"):
        numbers = group.get(name)
        if isinstance(numbers, dict):
            parts.append(f"{name} {numbers.get('type', 'int')}{numbers.get('num_bits', '?')}")
    return " ".join(parts) or "a group without weights"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
