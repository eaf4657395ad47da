"""A model of integers: its KV cache holds the tokens themselves, its logits are a hash of what a row sees.

It reads every token through slots, block tables and tree masks, as a real model does, so any mistake in those changes
its answers; and it costs microseconds, so thousands of steps can be tried. Real models are in the exactness tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from target.batch import ForwardBatch, ForwardOutput
from target.config import ModelConfig

VOCAB_SIZE = 11
EOS = 10


class TokenKV:
    """One integer a slot: the token and the position it was computed at."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.slots = np.full((num_blocks * block_size, 2), -7, np.int64)

    def move(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        self.slots[list(destinations)] = self.slots[list(sources)]


class TokenRunner:
    """A `Runner` whose next token is a function of the visible tokens and their positions alone."""

    description = "integers"
    device = torch.device("cpu")

    def __init__(
        self, num_blocks: int = 64, block_size: int = 4, *, eos: bool = False, max_model_len: int = 512
    ) -> None:
        self.kv_pool = TokenKV(num_blocks, block_size)
        self.num_forwards = 0
        self.config = ModelConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=2,
            intermediate_size=1,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_size=1,
            max_model_len=max_model_len,
            eos_token_ids=(EOS,) if eos else (),
        )

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        self.num_forwards += 1
        self.kv_pool.slots[batch.slot_mapping, 0] = batch.token_ids
        self.kv_pool.slots[batch.slot_mapping, 1] = batch.positions
        visible: list[list[tuple[int, int]]] = []
        for s in range(len(batch.num_computed)):
            table = batch.block_tables[s]
            computed, chain = int(batch.num_computed[s]), int(batch.chain_lens[s])
            for i in range(int(batch.row_starts[s + 1] - batch.row_starts[s])):
                mask = int(batch.tree_masks[batch.row_starts[s] + i])
                logical = [*range(computed + min(i + 1, chain))]
                logical += [computed + chain + bit for bit in range(64) if mask >> bit & 1]
                visible.append([self._read(table, index) for index in logical])
        rows = [self.logits(visible[row]) for row in batch.logit_rows]
        features = torch.tensor([[float(v[-1][0]), float(v[-1][1])] for v in visible])
        logits = torch.stack(rows) if rows else torch.zeros(0, VOCAB_SIZE)
        return ForwardOutput(logits, features if batch.feature_layers else None)

    def _read(self, table: np.ndarray, index: int) -> tuple[int, int]:
        slot = table[index // self.kv_pool.block_size] * self.kv_pool.block_size + index % self.kv_pool.block_size
        token, position = self.kv_pool.slots[slot]
        return int(token), int(position)

    @staticmethod
    def logits(visible: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Of the tokens and positions a row sees, in logical order."""
        assert [position for _, position in visible] == list(range(len(visible))), "a row sees a wrong position"
        state = 17
        for token, _ in visible[-5:]:
            state = (state * 1_000_003 + token * 7919 + 13) % (1 << 31)
        generator = np.random.default_rng(state)
        return torch.from_numpy(generator.normal(size=VOCAB_SIZE).astype(np.float32) * 2)
