"""Batches of every kind over one small pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from target.attention import KEY_BLOCK, AttentionBackend, HeadLayout, TorchAttention, compute_dtype
from target.kv_pool import KVPool
from target.layout import BatchEntry, lay_out
from target.row_stability import stable_tiles

BLOCK_SIZE = 16
BUSHY = (-1, 0, 0, 1, -1, 4, 3, 2, 6)
"""Parents of a tree whose nodes do not stand in the order of any path, but for the first two."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tiny models gain nothing from a second thread."""
    torch.set_num_threads(1)


@dataclass(frozen=True, slots=True)
class Entry:
    """A sequence that has `computed` tokens in the pool and brings `chain` more, and a draft tree."""

    computed: int
    chain: int = 1
    parents: Sequence[int] = ()

    @property
    def total(self) -> int:
        return self.computed + self.chain + len(self.parents)


class Case:
    """A pool filled with random numbers, NaN where no sequence reads, and one layer's heads for new tokens."""

    def __init__(
        self, entries: Sequence[Entry], heads: HeadLayout, *, dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> None:
        self.entries, self.heads = entries, heads
        tables, first = [], 1
        for entry in entries:
            count = -(-entry.total // BLOCK_SIZE)
            tables.append([first + (i * 5 + 2) % count if count % 5 else first + i for i in range(count)])
            first += count
        self.pool = KVPool(
            num_layers=2,
            num_blocks=first,
            block_size=BLOCK_SIZE,
            num_kv_heads=heads.num_kv_heads,
            head_size=heads.head_size,
            dtype=dtype,
            device=torch.device("cpu"),
        )
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.randn(self.pool.entries.shape, generator=generator)
        computed = [tables[s][i // 16] * 16 + i % 16 for s, entry in enumerate(entries) for i in range(entry.computed)]
        self.pool.entries.fill_(torch.nan)
        self.pool.entries[:, :, computed] = numbers[:, :, computed].to(dtype)
        self.pool.entries[:, :, self.pool.zero_slot] = 0
        self.tables = tables
        self.batch = lay_out(
            [
                BatchEntry(e.computed, [1] * e.chain, table, [1] * len(e.parents), e.parents)
                for e, table in zip(entries, tables, strict=True)
            ],
            BLOCK_SIZE,
        )
        shape = (len(self.batch.token_ids), heads.num_heads + 2 * heads.num_kv_heads, heads.head_size)
        self.qkv = torch.randn(shape, generator=generator).to(dtype)

    def rows(self, entry: int) -> slice:
        """Rows of an entry."""
        return slice(int(self.batch.row_starts[entry]), int(self.batch.row_starts[entry + 1]))

    def attend(self, backend: AttentionBackend, *, padding: int = 0) -> torch.Tensor:
        """What the backend says of layer 1; the pool is left as it was."""
        before = self.pool.entries.clone()
        qkv = torch.cat((self.qkv, torch.ones(padding, *self.qkv.shape[1:], dtype=self.qkv.dtype)))
        backend.begin(self.batch, len(qkv))
        out = backend.attend(1, qkv)
        self.written = self.pool.entries.clone()
        self.pool.entries.copy_(before)
        return out

    def expected(self, window: int | None = None) -> torch.Tensor:
        """What the torch backend says."""
        dtype = compute_dtype(self.pool.entries.dtype)
        tiles = stable_tiles(self.heads.queries_per_kv, self.heads.head_size, KEY_BLOCK, dtype, torch.device("cpu"))
        return self.attend(TorchAttention(self.pool, self.heads, window=window, tiles=tiles))
