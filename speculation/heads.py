"""The heads that the settings name, loaded for the engine's target and checked against it."""

from __future__ import annotations

from pathlib import Path

import structlog

from draft.config import Eagle3Config, MedusaConfig, SpeculationConfig
from draft.head_checkpoint import TargetTables
from draft.heads import HeadPlace, head_dtype, head_kind, load_head
from draft.proposer import Proposer
from draft.weights import shipped_eagle3
from speculation.head_check import first_guess_acceptance, misfit_warning
from speculation.settings import EngineSettings
from target import start_phases
from target.load import DTYPES
from target.runner import Runner

FIRST_GUESS: dict[str, SpeculationConfig] = {
    "eagle3": Eagle3Config(num_speculative_tokens=1),
    "medusa": MedusaConfig(num_speculative_tokens=1),
}


def load_heads(model_dir: Path, settings: EngineSettings, runner: Runner, num_blocks: int) -> dict[str, Proposer]:
    """A proposer for each head that `settings` name, by method.

    Heads that the user gives are tried on a few sentences, with the runner's KV pool, and one that hardly fits is
    warned of. Raises ValueError, naming the setting, for a folder that cannot be loaded.
    """
    shipped = shipped_eagle3(settings.model)
    given = {"eagle3": settings.eagle3, "medusa": settings.medusa}
    folders = {method: Path(folder).expanduser() for method, folder in given.items() if folder not in {None, "auto"}}
    if settings.eagle3 == "auto" and shipped is not None:
        folders["eagle3"] = shipped
    if not folders:
        return {}
    tables = TargetTables.of(model_dir)
    is_auto = settings.dtype == "auto"
    place = HeadPlace(
        runner.device,
        head_dtype(runner.device) if is_auto else DTYPES[settings.dtype],
        num_blocks,
        settings.block_size,
        max_catch_up_tokens=settings.max_num_batched_tokens,
        is_native=is_auto and settings.backend != "torch" and runner.device.type == "cpu",
        uses_triton=settings.backend != "torch" and runner.device.type == "cuda",
        cache_dir=Path(settings.cache_dir).expanduser(),
        shift_layers=settings.eagle3_shift_layers,
    )
    proposers: dict[str, Proposer] = {}
    for method, folder in folders.items():
        start_phases.begin(f"loading the {method} head")
        proposer = proposers[method] = _load(method, folder, tables, place)
        if folder != shipped:
            start_phases.begin(f"trying the {method} head on a few sentences")
            acceptance = first_guess_acceptance(runner, proposer, FIRST_GUESS[method], model_dir)
            warning = misfit_warning(f"{method} {folder}", acceptance)
            if warning is not None:
                structlog.get_logger("engine").warning(warning)
    return proposers


def _load(method: str, folder: Path, tables: TargetTables, place: HeadPlace) -> Proposer:
    try:
        kind = head_kind(folder)
        if kind != method:
            raise ValueError(f"{folder} holds a {kind}; give it as {kind}")
        return load_head(folder, tables, place)
    except ValueError as error:
        raise ValueError(f"{method}: {error}") from error
