"""Which tokens a head may guess: those that the target says most, as far as the recordings tell."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from draft.training.samples import Batch


@torch.no_grad()
def ranked_vocabulary(
    token_ids: npt.NDArray[np.int32], batches: Iterable[Batch], lm_head: torch.Tensor, max_pairs: int
) -> torch.Tensor:
    """[V] all token ids, the most expected first.

    How often a token stood in the recordings says little of rare ones, so what the target thought of all tokens at
    up to `max_pairs` pairs of the batches is counted as well. `lm_head` [V, E].
    """
    counts = torch.from_numpy(np.bincount(token_ids, minlength=len(lm_head))).double()
    expected = torch.zeros(len(lm_head), dtype=torch.float64)
    num_pairs = 0
    for batch in batches:
        for states in batch.states[batch.is_pair].split(256):
            expected += (states @ lm_head.T).softmax(-1).sum(0).double()
            num_pairs += len(states)
        if num_pairs >= max_pairs:
            break
    expected *= counts.sum() / max(num_pairs, 1)
    return (counts + expected).argsort(descending=True, stable=True)
