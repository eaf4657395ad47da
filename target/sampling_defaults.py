"""Reading the sampling defaults that come with a model: plain data, without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from target.sampling_params import MAX_TOP_K, RANGES

GENERATION_CONFIG = "generation_config.json"
SOURCE_FIELD = "forerun_sampling_source"
"""Field of the `generation_config.json` of a converted model that says where its sampling values were read."""
GGUF_PREFIX = "general.sampling."
GGUF_SOURCE = f"{GGUF_PREFIX}* (GGUF)"
GGUF_NAMES = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""llama.cpp's keys, after `GGUF_PREFIX`, to the fields of `generation_config.json`."""

MAX_TOKENS = 2**31 - 1
WHOLE_RANGES = {"top_k": (-1, MAX_TOP_K), "max_new_tokens": (1, MAX_TOKENS)}
"""Smallest and largest value of the fields that are whole numbers."""
SHOWN_CHARACTERS = 40


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling values that a model's files recommend, for requests that do not set them. None is not recommended."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """0 keeps every token."""
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    """From `max_new_tokens`: a default, not a limit. A request's own value may be larger."""
    source: str = ""
    """Where the values were read: "generation_config.json" or "general.sampling.* (GGUF)"; empty without values."""


def read_sampling_defaults(model_dir: Path) -> tuple[SamplingDefaults, list[str]]:
    """The sampling defaults of a model folder, and a sentence for each value there that cannot be used.

    Read from `generation_config.json`, into which a conversion from GGUF copies the file's `general.sampling.*` keys.
    As in vLLM (`ModelConfig.get_diff_sampling_param`) the fields are temperature, top_p, top_k, min_p,
    repetition_penalty and max_new_tokens, and `do_sample` is not looked at: a file whose `do_sample` is false or
    absent still recommends its temperature, and without one the temperature is not 0 but left to the server. Unlike
    vLLM, a value that equals transformers' own default counts too, since it is what the file says. `top_k` of -1 is 0.

    Raises nothing: a file that cannot be read has no defaults.
    """
    path = model_dir / GENERATION_CONFIG
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return SamplingDefaults(), []
    except (OSError, ValueError, RecursionError) as error:
        return SamplingDefaults(), [f"{path.name} is not readable JSON: {error}"]
    if not isinstance(fields, dict):
        return SamplingDefaults(), [f"{path.name} holds a {type(fields).__name__}; it must hold an object"]
    return _defaults_of(fields)


def gguf_sampling_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `generation_config.json` for the `general.sampling.*` keys among a GGUF file's `values`.

    A value of a wrong type is copied as it is, for `read_sampling_defaults` to name it.
    """
    found = {field: values.get(GGUF_PREFIX + name) for name, field in GGUF_NAMES.items()}
    known = {field: _as_json(value) for field, value in found.items() if value is not None}
    return {**known, SOURCE_FIELD: GGUF_SOURCE if known else None}


def _as_json(value: object) -> object:
    """A value that JSON can hold; others as their text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float) else str(value)


def _defaults_of(fields: Mapping[str, Any]) -> tuple[SamplingDefaults, list[str]]:
    values: dict[str, Any] = {}
    problems = []
    for name in (*GGUF_NAMES.values(), "max_new_tokens"):
        value = fields.get(name)
        if value is None:
            continue
        problem = _whole_problem(name, value) if name in WHOLE_RANGES else _real_problem(name, value)
        if problem:
            problems.append(f"{name} is {_shown(value)}; it must be {problem}")
        elif name == "max_new_tokens":
            values["max_tokens"] = value
        else:
            values[name] = max(value, 0) if name == "top_k" else float(value)
    if not values:
        return SamplingDefaults(), problems
    source = fields.get(SOURCE_FIELD)
    return SamplingDefaults(**values, source=source if isinstance(source, str) else GENERATION_CONFIG), problems


def _whole_problem(name: str, value: object) -> str:
    """What a whole number must be, where `value` is not it; otherwise empty."""
    low, high = WHOLE_RANGES[name]
    is_fine = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    return "" if is_fine else f"a whole number from {low} to {high}"


def _real_problem(name: str, value: object) -> str:
    """What a number must be, where `value` is not it; otherwise empty."""
    is_fine = not isinstance(value, bool) and value in RANGES[name]
    return "" if is_fine else f"a number {RANGES[name]}"


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"
