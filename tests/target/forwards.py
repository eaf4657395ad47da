"""Running token sequences through a runner in every way that must give the same logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from target.layout import BatchEntry, lay_out
from target.runner import Runner


def tokens(count: int, seed: int, vocab_size: int = 211) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(0, vocab_size, (count,), generator=generator).tolist()
    return ids


def blocks(runner: Runner, first: int, count: int) -> list[int]:
    """Ids of enough blocks for `count` tokens, from `first` on, in an order that is not theirs."""
    number = -(-count // runner.kv_pool.block_size)
    return [first + (i * 7 + 3) % number if number % 7 else first + i for i in range(number)]


def run(runner: Runner, *entries: BatchEntry, features: tuple[int, ...] = ()) -> torch.Tensor:
    """Logits of the entries' wanted rows."""
    return runner.forward(lay_out(entries, runner.kv_pool.block_size, features)).logits


def in_chunks(runner: Runner, ids: Sequence[int], size: int, block_ids: Sequence[int]) -> torch.Tensor:
    """[len(ids), vocabulary] logits of a sequence, computed `size` tokens at a time."""
    return torch.cat(
        [
            run(runner, BatchEntry(start, ids[start : start + size], block_ids, logits_from=0))
            for start in range(0, len(ids), size)
        ]
    )
