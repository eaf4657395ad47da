"""What an engine is told at start: plain data, given to `speculation.worker` as JSON, part of the settings tree."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from draft.config import AutoConfig, SpeculationConfig
from speculation.log_format import LogFormat

PositiveInt = Annotated[int, Meta(ge=1)]
PathText = Annotated[str, Meta(min_length=1)]
"""Empty would be the current folder, which nobody means."""


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine: its model, where it runs, its memory and its limits. A field's `Meta` description is its help."""

    model: Annotated[
        str,
        Meta(description='the target: a Hugging Face folder, a .gguf file, or "embedded" for SmolLM2-135M-Instruct'),
    ] = "embedded"
    draft_model: Annotated[
        PathText | None,
        Meta(
            description="folder or .gguf file of a small model with the target's tokenizer, which enables draft_model; "
            '"auto" is the one that comes with forerun for the embedded model'
        ),
    ] = None
    eagle3: Annotated[
        PathText | None,
        Meta(
            description='folder of an EAGLE-3 head; "auto" is the one that comes with forerun for the embedded model, '
            '"none" is no head'
        ),
    ] = "auto"
    eagle3_shift_layers: Annotated[
        int,
        Meta(
            ge=-4,
            le=4,
            description="offset of the target layers that an EAGLE-3 head names; some heads count differently",
        ),
    ] = 0
    medusa: Annotated[PathText | None, Meta(description="folder of Medusa heads for the target; enables medusa")] = None
    cache_dir: Annotated[str, Meta(description="cache folder for converted models and compiled code")] = (
        "~/.cache/forerun"
    )
    device: Annotated[
        str,
        Meta(
            description='"auto" (CUDA where there is a device), "cpu", "cuda" or "cuda:<number>"',
            pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        ),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="precision of weights and activations; auto is float32 on a CPU, bfloat16 on CUDA"),
    ] = "auto"
    backend: Annotated[
        Literal["auto", "torch", "native", "triton", "flashinfer"],
        Meta(description="implementation that runs the model; auto is the fastest for the device"),
    ] = "auto"
    quantization: Annotated[
        Literal["auto", "none", "int8", "q4", "fp8"],
        Meta(
            description="how weights are stored; auto keeps what the backend does best without loss of quality; "
            "int8 and q4 are for a CPU, fp8 for CUDA devices of compute capability 8.9 and later"
        ),
    ] = "auto"
    num_threads: Annotated[
        PositiveInt | None,
        Meta(description="threads of the native CPU backend; unset, one per core that the engine may use"),
    ] = None
    num_blocks: Annotated[
        Annotated[int, Meta(ge=2)] | None,
        Meta(description="blocks of the KV cache, the null block included; unset, kv_memory decides"),
    ] = None
    kv_memory: Annotated[
        PositiveInt | None,
        Meta(description="bytes of the KV cache; unset, and without num_blocks, 1 GiB"),
    ] = None
    block_size: Annotated[PositiveInt, Meta(description="tokens per block of the KV cache")] = 16
    max_model_len: Annotated[
        PositiveInt | None,
        Meta(description="maximum tokens of a sequence, prompt and output; unset, the context length of the model"),
    ] = None
    max_num_seqs: Annotated[PositiveInt, Meta(description="maximum sequences in a batch")] = 32
    max_num_batched_tokens: Annotated[
        PositiveInt, Meta(description="token budget of a step, shared by prompts, decoding and drafts")
    ] = 512
    max_waiting: Annotated[int, Meta(ge=0, description="maximum sequences in the queue; further requests get 429")] = (
        256
    )
    speculation: Annotated[
        SpeculationConfig,
        Meta(description='default speculation config: a method, or JSON like {"method": "ngram"}'),
    ] = AutoConfig()
    corpus_tokens: Annotated[
        int,
        Meta(
            ge=2, description="maximum tokens of finished responses that suffix matching keeps, in all; a power of two"
        ),
    ] = 1 << 18
    check_invariants: Annotated[
        bool, Meta(description="assert the engine's invariants after every step, not only when idle; for tests")
    ] = False
    log_format: Annotated[
        LogFormat,
        Meta(description='form of log lines; "auto" is "console" where standard error is a terminal, else "json"'),
    ] = "auto"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="minimum level of logged lines")
    ] = "info"
