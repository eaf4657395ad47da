"""From settings to a running engine: model, KV pool, proposers, and what the front is told of them."""

from __future__ import annotations

import time
from pathlib import Path

import structlog

from draft.draft_model import DraftModelProposer
from draft.proposer import Proposer
from draft.registry import lookup_proposers
from draft.roster import Roster
from draft.tokenizer_match import require_same_tokenizer
from draft.weights import shipped_draft_model
from speculation.calibration import time_steps
from speculation.controller import DraftLengthController
from speculation.cost_model import StepCostModel
from speculation.engine import Engine
from speculation.heads import load_heads
from speculation.messages import Ready
from speculation.settings import EngineSettings
from target import start_phases
from target.arithmetic import arithmetic_of
from target.config import ModelConfig
from target.embedded import cached_conversion, embedded_model_dir
from target.fingerprint import model_fingerprint
from target.hf_config import read_config
from target.load import kv_block_bytes, load_runner
from target.runner import Runner
from target.sampling import compile_sampler
from target.sampling_defaults import SamplingDefaults, read_sampling_defaults

DEFAULT_KV_MEMORY = 1 << 30
"""Bytes of the KV pool where nothing is set."""
HEARTBEAT_SECONDS = 1.0


def assemble(settings: EngineSettings) -> tuple[Engine, Ready]:
    """Load everything `settings` name. Raises ValueError, naming the setting, for what does not fit together."""
    cache_dir = Path(settings.cache_dir).expanduser()
    start_phases.begin("reading the model")
    folder = model_folder(settings.model, cache_dir)
    config = read_config(folder)
    num_blocks = settings.num_blocks or _num_blocks(config, settings)
    start_phases.begin("loading the weights")
    runner = _load(folder, settings, num_blocks)
    if runner.device.type == "cpu":
        start_phases.begin("preparing the sampler")
        compile_sampler(cache_dir)
    proposers: dict[str, Proposer] = lookup_proposers(settings.corpus_tokens)
    if settings.draft_model is not None:
        start_phases.begin("loading the draft model")
        draft_folder = _draft_folder(settings.draft_model, settings.model, cache_dir)
        require_same_tokenizer(folder, draft_folder)
        proposers["draft_model"] = _draft_model(draft_folder, settings, num_blocks, target=config)
    proposers |= load_heads(folder, settings, runner, num_blocks)
    costs = StepCostModel()
    identity = model_fingerprint(folder, dtype=settings.dtype, quantization=_arithmetic(settings, runner))
    engine = Engine(
        runner,
        Roster(proposers),
        DraftLengthController(costs),
        model_fingerprint=identity,
        default_config=settings.speculation,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_waiting=settings.max_waiting,
        max_model_len=settings.max_model_len,
    )
    start_phases.begin("measuring steps")
    costs.calibrate(time_steps(runner, engine.pool, time.monotonic, max_model_len=engine.max_model_len))
    return engine, Ready(
        model_fingerprint=identity,
        model_folder=str(folder),
        max_model_len=engine.max_model_len,
        vocab_size=config.vocab_size,
        num_blocks=num_blocks,
        block_size=settings.block_size,
        methods=engine.methods,
        max_waiting=settings.max_waiting,
        description=runner.description,
        max_num_seqs=settings.max_num_seqs,
        heartbeat_seconds=HEARTBEAT_SECONDS,
        sampling_defaults=_sampling_defaults(folder),
    )


def model_folder(model: str, cache_dir: Path, *, setting: str = "model") -> Path:
    """The Hugging Face folder of a model that is "embedded", a .gguf file (converted once) or such a folder already.

    Raises ValueError, naming the setting, for what is none of these.
    """
    if model == "embedded":
        return embedded_model_dir(cache_dir)
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        return cached_conversion(path, start_phases.begin, cache_dir)
    if not path.is_dir():
        raise ValueError(f'{setting} is {model!r}; it must be a Hugging Face folder, a .gguf file or "embedded"')
    return path


def _sampling_defaults(folder: Path) -> SamplingDefaults:
    """The model's sampling defaults; values that cannot be used are named in one line of the log."""
    defaults, problems = read_sampling_defaults(folder)
    if problems:
        structlog.get_logger("engine").warning("sampling defaults ignored", model_folder=str(folder), reasons=problems)
    return defaults


def _load(folder: Path, settings: EngineSettings, num_blocks: int) -> Runner:
    return load_runner(
        folder,
        num_blocks=num_blocks,
        block_size=settings.block_size,
        device=settings.device,
        dtype=settings.dtype,
        backend=settings.backend,
        quantization=settings.quantization,
        num_threads=settings.num_threads,
        max_model_len=settings.max_model_len,
        cache_dir=Path(settings.cache_dir).expanduser(),
    )


def _draft_folder(draft_model: str, model: str, cache_dir: Path) -> Path:
    if draft_model != "auto":
        return model_folder(draft_model, cache_dir, setting="draft_model")
    shipped = shipped_draft_model(model)
    if shipped is None:
        raise ValueError(f'draft_model is "auto", but none comes with forerun for {model}; name a folder')
    return shipped


def _draft_model(folder: Path, settings: EngineSettings, num_blocks: int, *, target: ModelConfig) -> Proposer:
    """A draft model whose pool holds as many tokens as the target's."""
    try:
        runner = _load(folder, settings, num_blocks)
    except ValueError as error:
        raise ValueError(f"draft_model: {error}") from error
    return DraftModelProposer(
        runner,
        model_fingerprint=model_fingerprint(folder, dtype=settings.dtype, quantization=_arithmetic(settings, runner)),
        vocab_size=target.vocab_size,
        eos_token_ids=target.eos_token_ids,
        max_catch_up_tokens=settings.max_num_batched_tokens,
    )


def _arithmetic(settings: EngineSettings, runner: Runner) -> str:
    """What tells runners apart whose numbers may differ in their last bits: they share neither prefixes nor streams."""
    return f"{settings.quantization}/{arithmetic_of(runner)}"


def _num_blocks(config: ModelConfig, settings: EngineSettings) -> int:
    block_bytes = kv_block_bytes(
        config,
        block_size=settings.block_size,
        device=settings.device,
        dtype=settings.dtype,
        backend=settings.backend,
    )
    return max((settings.kv_memory or DEFAULT_KV_MEMORY) // block_bytes, 2)
