"""From a folder to the proposer it holds: an EAGLE-3 head, Medusa heads, or a whole model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from draft.eagle3 import Eagle3Proposer
from draft.eagle3_checkpoint import load_eagle3
from draft.head_checkpoint import TargetTables
from draft.medusa import MedusaProposer
from draft.medusa_heads import MedusaHeads
from target.errors import CheckpointError
from target.hf_config import read_json

NATIVE_PAIRS_BEHIND = 256

HeadKind = Literal["eagle3", "medusa", "draft_model"]


@dataclass(frozen=True, slots=True)
class HeadPlace:
    """Where a head computes, and how much it may keep."""

    device: torch.device
    dtype: torch.dtype
    num_blocks: int
    """Of its KV pool, where it has one."""
    block_size: int
    max_catch_up_tokens: int = 512
    max_pairs_behind: int | None = None
    """See `Eagle3Proposer`; by default 256 for a native head, whose processor has better things to do."""
    is_native: bool = False
    """Whether an EAGLE-3 head is to be computed by machine code of its own, on a CPU that allows it."""
    uses_triton: bool = False
    """Whether, on CUDA, by Triton's kernels, with its steps captured."""
    cache_dir: Path | None = None
    """Where that is kept; by default where converted models are."""
    shift_layers: int = 0
    """Added to the target layers that an EAGLE-3 checkpoint says it reads."""


def head_dtype(device: torch.device) -> torch.dtype:
    """The precision that suits a device."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def head_kind(folder: Path) -> HeadKind:
    """What a folder holds, by its config.json. Raises `CheckpointError` for a format that is not served."""
    path = folder / "config.json"
    fields = read_json(path)
    kind = fields.get("speculators_model_type")
    if kind not in {None, "eagle3"}:
        raise CheckpointError(f"{path}: speculators_model_type is {kind!r}; of these, 'eagle3' is served")
    names = " ".join(fields.get("architectures") or ())
    if kind == "eagle3" or "eagle3" in names.lower() or "draft_vocab_size" in fields:
        return "eagle3"
    return "medusa" if "medusa_num_heads" in fields else "draft_model"


def load_head(folder: Path, tables: TargetTables, place: HeadPlace) -> Eagle3Proposer | MedusaProposer:
    """The proposer of a head's folder, for the target of `tables`.

    Raises `CheckpointError` for what is missing or does not fit, also for a folder that holds a whole model.
    """
    eos_token_ids = tables.config.eos_token_ids
    match head_kind(folder):
        case "eagle3":
            head = load_eagle3(
                folder,
                tables,
                num_blocks=place.num_blocks,
                block_size=place.block_size,
                dtype=place.dtype,
                device=place.device,
                shift_layers=place.shift_layers,
                is_native=place.is_native,
                uses_triton=place.uses_triton,
                cache_dir=place.cache_dir,
            )
            behind = place.max_pairs_behind or (NATIVE_PAIRS_BEHIND if place.is_native else 1 << 20)
            return Eagle3Proposer(
                head,
                eos_token_ids=eos_token_ids,
                max_catch_up_tokens=place.max_catch_up_tokens,
                max_pairs_behind=behind,
            )
        case "medusa":
            return MedusaProposer(MedusaHeads(folder, tables, place.dtype, place.device), eos_token_ids=eos_token_ids)
        case "draft_model":
            raise CheckpointError(f"{folder} holds a whole model, not a head; give it as draft_model")
