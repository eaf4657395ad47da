"""What a head would say next, best first: the target's own rule of choice on the head's logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from target.sampling import SamplingRow, rank


@dataclass(frozen=True, slots=True)
class Candidates:
    """Guesses for R rows, best first."""

    token_ids: list[list[int]]
    """[R][width] in the target's vocabulary."""
    chances: list[list[float]]
    """[R][width] how likely the head thinks each."""


@torch.inference_mode()
def best_candidates(
    logits: torch.Tensor, rows: Sequence[SamplingRow], target_ids: torch.Tensor, width: int
) -> Candidates:
    """The `width` tokens of each row that the target is most likely to choose there, as far as the head can tell.

    `logits` [R, C] of tokens `target_ids` [C], ascending. Where a request samples, candidates are ranked with the
    target's own noise, because it is what the target's choice will depend on; their chance is the softmax of the
    noisy logits, which says the same at temperature 0.
    """
    columns, log_chances = rank(logits, rows, min(width, logits.shape[1]), target_ids)
    return Candidates(target_ids[columns].tolist(), log_chances.exp().tolist())
