"""From a model's folder to a runner: which device, which precision, which path."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from target.checkpoint import load_weights
from target.config import ModelConfig
from target.digests import verified
from target.fp8 import require_fp8
from target.hf_config import read_config
from target.native.load import NativeUnsupported, load_native_runner, unsupported_reason
from target.runner import Runner
from target.torch_runner import TorchRunner

if TYPE_CHECKING:
    from target.triton.runner import TritonRunner

BACKENDS = ("auto", "torch", "native", "triton", "flashinfer")
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


def load_runner(
    model_dir: Path,
    *,
    num_blocks: int,
    block_size: int = 16,
    device: str = "auto",
    dtype: str = "auto",
    backend: str = "auto",
    quantization: str = "auto",
    num_threads: int | None = None,
    max_model_len: int | None = None,
    cache_dir: Path | None = None,
) -> Runner:
    """Load the model in `model_dir` (a Hugging Face folder) with a KV pool of `num_blocks` blocks.

    `device` auto is CUDA where there is one, else the CPU; `dtype` auto is bfloat16 on CUDA, else float32.
    `backend` auto is Triton on CUDA, and the native step on a CPU where processor and model allow it, else torch; the
    runner's description says which and why. `quantization`: see `target.native.load` for a CPU; the others have "none",
    and on CUDA `fp8` (see `target.fp8`), which "auto" does not choose.
    `num_threads`: of the native step, by default one for every core; torch has a setting of its own.
    `max_model_len`: positions to serve, at most the model's own (the default). `cache_dir`: where the native step's
    machine code is kept, by default `target.embedded.default_cache_dir()`.
    Weight files whose digests were kept are compared with them, see `target.digests`.
    Raises `CheckpointError` for what is on disk, `ValueError` for the arguments.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}")
    config = read_config(model_dir)
    length = config.max_model_len if max_model_len is None else max_model_len
    if not 1 <= length <= config.max_model_len:
        raise ValueError(f"max_model_len is {length}; the model has positions for 1 to {config.max_model_len}")
    place = _device(device)
    if quantization == "fp8":
        require_fp8(torch.device("cpu") if backend == "native" else place, _dtype(dtype, place))
    with verified(model_dir):
        reason = ""
        if _wants_native(place, dtype, backend):
            try:
                runner = load_native_runner(
                    config,
                    model_dir,
                    num_blocks=num_blocks,
                    block_size=block_size,
                    quantization=quantization,
                    num_threads=num_threads,
                    max_model_len=length,
                    cache_dir=cache_dir,
                )
                torch.set_num_threads(1)  # what little torch still does would only take cores from the native step
                return runner
            except NativeUnsupported as unsupported:
                if backend == "native":
                    raise
                reason = f"; not the native step: {unsupported}"
        if quantization not in {"auto", "none", "fp8"}:
            fitting = "'auto', 'none' or 'fp8'" if place.type == "cuda" else "'auto' or 'none'"
            raise ValueError(f"quantization is {quantization!r}; without the native step it must be {fitting}{reason}")
        weights = load_weights(model_dir, config, _dtype(dtype, place))
        make = _runner_of(backend, place, weights.embed.dtype)
        chosen = make(
            config,
            weights,
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=length,
            device=place,
            quantization="fp8" if quantization == "fp8" else "none",
        )
        chosen.description += reason
        return chosen


def _runner_of(backend: str, device: torch.device, dtype: torch.dtype) -> Callable[..., TorchRunner | TritonRunner]:
    """The runner of a backend that computes unquantised. Raises `ValueError` where it cannot run here."""
    if backend == "auto":
        backend = "triton" if device.type == "cuda" and dtype != torch.float64 else "torch"
    if backend == "torch":
        return TorchRunner
    if device.type != "cuda":
        raise ValueError(f"backend is {backend!r}; it must be 'auto', 'torch' or 'native' on device {str(device)!r}")
    # Both come with builds of torch for CUDA or with extras, and nobody else waits for them.
    if backend == "flashinfer":
        from target.flashinfer_attention import FlashInferAttention

        return partial(TorchRunner, make_attention=FlashInferAttention)
    from target.triton.runner import TritonRunner

    return TritonRunner


def kv_block_bytes(config: ModelConfig, *, block_size: int, device: str, dtype: str, backend: str) -> int:
    """Bytes of one block of the KV pool, keys and values of every layer, of what `load_runner` would make."""
    place = _device(device)
    is_native = _wants_native(place, dtype, backend) and unsupported_reason(config, block_size) is None
    number_bytes = 2 if is_native else _dtype(dtype, place).itemsize
    return 2 * config.num_layers * config.num_kv_heads * config.head_size * block_size * number_bytes


def _wants_native(device: torch.device, dtype: str, backend: str) -> bool:
    return backend == "native" or (backend == "auto" and device.type == "cpu" and dtype == "auto")


def _device(name: str) -> torch.device:
    """The device of this name. Raises `ValueError` where torch does not have it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device is {name!r}; it must be 'auto', 'cpu' or 'cuda'") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {name!r}, but torch sees no CUDA device; 'auto' or 'cpu' would work")
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    """The precision of this name. Raises `ValueError` for one that models are not run in."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise ValueError(f"dtype is {name!r}; it must be 'auto', {', '.join(map(repr, DTYPES))}")
    dtype: torch.dtype = DTYPES[name]
    return dtype
