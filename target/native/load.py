"""From a model to a native runner, or to the reason why there can be none."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from target.checkpoint import load_weights
from target.config import ModelConfig
from target.embedded import GGUF_NAME, default_cache_dir
from target.native.attention_tiles import TILE
from target.native.compiling import kept_in
from target.native.isa import ISAS, native_supported, supported_isas
from target.native.packed_model import PackedModel, holds_q4, pack_gguf, pack_weights
from target.native.runner import NativeRunner
from target.native.step import run
from target.start_phases import begin
from target.weights import ModelWeights

QUANTIZATIONS = ("auto", "none", "int8", "q4")
MAX_DEFAULT_THREADS = 16

logger = logging.getLogger(__name__)


class NativeUnsupported(ValueError):
    """Why the native step cannot serve this model here; the torch path can."""


def unsupported_reason(config: ModelConfig, block_size: int) -> str | None:
    """Why the native step cannot compute this model on this processor; None if it can."""
    possible, reason = native_supported()
    if not possible:
        return reason
    if config.sliding_window is not None:
        return f"sliding_window is {config.sliding_window}; the native step attends to everything"
    if block_size % TILE:
        return f"block_size is {block_size}; the native step needs a multiple of {TILE}"
    for name in ("hidden_size", "intermediate_size", "head_size"):
        if getattr(config, name) % 32:
            return f"{name} is {getattr(config, name)}; the native step needs a multiple of 32"
    return None


def load_native_runner(
    config: ModelConfig,
    source: Path | ModelWeights,
    *,
    num_blocks: int,
    block_size: int = 16,
    quantization: str = "auto",
    num_threads: int | None = None,
    max_model_len: int | None = None,
    isa: str = "auto",
    cache_dir: Path | None = None,
    progress: Callable[[str], None] = begin,
) -> NativeRunner:
    """Load a model, from its folder or from weights in memory, for the native step.

    `quantization`: `q4` is Q4_1 in groups of 32 with 8-bit activations, taken bit for bit from a folder's `model.gguf`
    where that has it; `int8` is 8-bit groups with 16-bit activations; `none` is float32; `auto` is the file's own q4,
    else int8. Under q4, embedding and head are int8. `num_threads`: by default one a processor. `isa`: an instruction
    set of `target.native.isa.ISAS`, by default the best there is. `cache_dir`: where machine code is kept, by default
    `target.embedded.default_cache_dir()`; `progress` is told when it has to be made (about 20 seconds).

    Raises `NativeUnsupported` where the torch path must serve, `ValueError` for arguments, `CheckpointError` for files.
    """
    reason = unsupported_reason(config, block_size)
    if reason is not None:
        raise NativeUnsupported(reason)
    threads = _default_threads() if num_threads is None else num_threads
    if threads < 1:
        raise ValueError(f"num_threads is {threads}; it must be at least 1")
    number = _isa_number(isa)
    packed = _pack(config, source, quantization)
    with kept_in(cache_dir or default_cache_dir(), run) as compiled_before:
        if not compiled_before:
            progress("compiling the native step for this processor, once; it takes 20 seconds and more")
        return NativeRunner(
            config,
            packed,
            num_blocks=num_blocks,
            block_size=block_size,
            num_threads=threads,
            max_model_len=min(max_model_len or config.max_model_len, num_blocks * block_size),
            isa=number,
        )


def _default_threads() -> int:
    return min(len(os.sched_getaffinity(0)), MAX_DEFAULT_THREADS)


def _isa_number(name: str) -> int:
    available = supported_isas()
    if name == "auto":
        return available[-1]
    if ISAS.get(name) not in available:
        names = ", ".join(key for key, number in ISAS.items() if number in available)
        raise ValueError(f"isa is {name!r}; this processor has {names}")
    return ISAS[name]


def _pack(config: ModelConfig, source: Path | ModelWeights, quantization: str) -> PackedModel:
    if quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization is {quantization!r}; it must be one of {', '.join(QUANTIZATIONS)}")
    if isinstance(source, ModelWeights):
        return pack_weights(source, "int8" if quantization == "auto" else quantization)
    gguf = source / GGUF_NAME
    if quantization in {"auto", "q4"} and gguf.is_file() and holds_q4(gguf):
        return pack_gguf(gguf, config)
    import torch

    return pack_weights(load_weights(source, config, torch.float32), "int8" if quantization == "auto" else quantization)
