"""What executes a forward: one interface over the torch path and the native ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from target.batch import ForwardBatch, ForwardOutput
from target.config import ModelConfig


class MovableKV(Protocol):
    """A paged KV cache as the engine sees it."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    def move(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy entries between slots in every layer, as if all at once."""


class Runner(Protocol):
    """A loaded model with its KV pool.

    A row's logits depend on the tokens it sees and their positions alone: never on its neighbours in the batch, the
    size of the batch, or how earlier tokens were chunked. Bitwise.
    """

    @property
    def config(self) -> ModelConfig: ...

    @property
    def kv_pool(self) -> MovableKV: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def description(self) -> str:
        """One line for the start-up log: which path runs, at which precision, and why."""

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Write the new tokens' keys and values into the pool and return the asked logits and features."""
