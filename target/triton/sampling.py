"""The choice of tokens on a device, as two launches over rows and parts of the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton

from target.noise import noise_keys
from target.sampling_params import SamplingParams
from target.transfers import to_device
from target.triton.sampling_kernels import choose_kernel, maxima_kernel

PART = 2048
"""Tokens that one program looks at."""


def choose_unfiltered(
    adjusted: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> torch.Tensor:
    """[R] what `target.sampling.choose` says of rows without top-k and top-p; no vocabulary-sized temporary.

    `adjusted`: [R, V] logits behind bias and penalties; `positions`: of the tokens to be chosen.
    """
    num_rows, vocab_size = adjusted.shape
    num_parts = triton.cdiv(vocab_size, PART)
    device = adjusted.device
    seeds = np.array([p.seed for p in params], np.uint64)
    keys = to_device(noise_keys(seeds, np.array(positions, np.int64)), device)
    floats = [
        [0.0 if p.is_greedy else p.temperature for p in params],
        [-np.inf if p.is_greedy or p.min_p == 0.0 else np.log(p.min_p) for p in params],
    ]
    temperatures, floors = to_device(np.array(floats, np.float32), device)
    maxima = torch.empty((num_rows, num_parts), dtype=torch.float32, device=device)
    scores = torch.empty((num_rows, num_parts), dtype=torch.float64, device=device)
    token_ids = torch.empty((num_rows, num_parts), dtype=torch.int64, device=device)
    grid = (num_rows, num_parts)
    logits = adjusted if adjusted.stride(1) == 1 else adjusted.contiguous()
    maxima_kernel[grid](logits, logits.stride(0), temperatures, maxima, vocab_size, num_parts, PART=PART)
    choose_kernel[grid](
        logits,
        logits.stride(0),
        temperatures,
        floors,
        keys,
        maxima,
        scores,
        token_ids,
        vocab_size,
        num_parts,
        PART=PART,
        PARTS_PAD=triton.next_power_of_2(num_parts),
    )
    return token_ids.gather(1, scores.argmax(dim=1, keepdim=True))[:, 0]
