"""Attention over the paged KV pool: the seam, and the plain torch backend that specifies the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from target.attention_plan import AttentionPlan, AttentionPlanner, TileGroup
from target.batch import ForwardBatch, IntArray
from target.kv_pool import KVPool
from target.rope import Rotation
from target.row_stability import Tiles, scaled_product

KEY_BLOCK = 128
"""Tokens in a key block: fewer would make more products a row, more would waste work on short contexts."""

CACHED_NUMBERS = 1 << 20
"""Most numbers that products computed together gather and produce on their way."""


class AttentionBackend(Protocol):
    """Writes new keys and values, and reads what each row sees."""

    def begin(self, batch: ForwardBatch, num_rows: int) -> None:
        """Prepare a forward of the batch, padded to `num_rows` rows: everything that does not depend on the layer."""

    def attend(self, layer: int, qkv: torch.Tensor, rotation: Rotation | None = None) -> torch.Tensor:
        """Write the layer's new keys and values into the pool, then let every row attend to what it sees.

        `qkv`: [num_rows, H + 2K, D] query heads, key heads, value heads; overwritten. `rotation` is applied to them
        first; without it they are rotated already. Returns [num_rows, H * D]; padding rows get zeros.
        """


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """H query heads, K key-value heads, D dimensions a head; query head h reads key-value head h // (H / K)."""

    num_heads: int
    num_kv_heads: int
    head_size: int

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share a key-value head."""
        return self.num_heads // self.num_kv_heads

    def head_offsets(self) -> IntArray:
        """[K, 1, H / K] place of each query head in a row of heads, by its key-value head."""
        return np.arange(self.num_heads).reshape(self.num_kv_heads, 1, self.queries_per_kv)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision attention computes in, for keys and values stored as `dtype`: float32 at least."""
    return torch.float32 if dtype in {torch.bfloat16, torch.float16} else dtype


class TorchAttention:
    """Attention in plain torch whose every sum has an order that is fixed by the row alone.

    A row's visible tokens, in logical order, are cut into key blocks of fixed length, the last one padded. Scores,
    exponentials and weighted values of a row against one key block, its *piece*, come from products of fixed length.
    A row's pieces are then added pairwise, neighbours first: a tree of sums that appended zeros do not change. The
    maximum is exact in any order. Rows of one sequence share the products of a block (a tile of rows, of a size among
    `tiles.rows`), and all tiles of one size are one batched product; these sizes were measured to be stable.
    """

    def __init__(self, pool: KVPool, heads: HeadLayout, *, window: int | None, tiles: Tiles) -> None:
        self._heads = heads
        self._tiles = tiles
        self._pool = pool
        self._flat = pool.entries.view(pool.entries.shape[0], -1, heads.head_size)
        self._planner = AttentionPlanner(
            block_size=pool.block_size,
            zero_slot=pool.zero_slot,
            key_block=KEY_BLOCK,
            tile_rows=tiles.rows,
            window=window,
        )
        self._work: _Forward | None = None

    def begin(self, batch: ForwardBatch, num_rows: int) -> None:
        """See `AttentionBackend.begin`."""
        layout = _Layout(self._heads, self._tiles.query_multiple, self._pool.zero_slot + 1)
        self._work = _Forward(layout, self._planner.plan(batch), batch.slot_mapping, num_rows, self._pool.entries)

    def attend(self, layer: int, qkv: torch.Tensor, rotation: Rotation | None = None) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        assert self._work is not None, "attend before begin"
        if rotation is not None:
            rotation.apply(qkv, self._heads.num_heads, self._heads.num_kv_heads)
        return self._work.attend(self._flat[layer], qkv)


@dataclass(frozen=True, slots=True)
class _Layout:
    """How heads, rows and slots are numbered in flat indices."""

    heads: HeadLayout
    row_multiple: int
    num_slots: int

    def product_rows(self, tile_rows: int) -> int:
        """Rows of the products of a tile: its queries of one key-value head, padded."""
        return -(-tile_rows * self.heads.queries_per_kv // self.row_multiple) * self.row_multiple

    def query_index(self, group: TileGroup) -> IntArray:
        """[K, items, M] the queries of each product in [num_rows * (H + 2K)] heads; padding repeats the first."""
        per_row = self.heads.num_heads + 2 * self.heads.num_kv_heads
        rows = np.maximum(group.rows, 0) * per_row
        index = rows[None, :, :, None] + self.heads.head_offsets()[:, :, None]
        return self._padded(index.reshape(self.heads.num_kv_heads, len(rows), -1), 0)

    def bounds(self, bound: IntArray) -> IntArray:
        """[items, M] a bound of each tile row, repeated for its queries."""
        return self._padded(bound.repeat(self.heads.queries_per_kv, axis=1), 0)

    def slot_index(self, slots: IntArray) -> IntArray:
        """[2K, …] of a layer's flat pool: `slots` in every key head, then in every value head."""
        starts = np.arange(2 * self.heads.num_kv_heads) * self.num_slots
        return starts.reshape(-1, *(1,) * slots.ndim) + slots

    def slices(self, group: TileGroup) -> Iterator[TileGroup]:
        """The group in parts whose gathered keys and values and whose scores stay in the processor's cache."""
        size, rows = self.heads.head_size, self.product_rows(group.rows.shape[1])
        count = max(1, CACHED_NUMBERS // (self.heads.num_kv_heads * KEY_BLOCK * (2 * size + rows)))
        for start in range(0, len(group.rows), count):
            yield group.part(start, start + count)

    def _padded(self, index: IntArray, fill: int) -> IntArray:
        missing = -index.shape[-1] % self.row_multiple
        widths = [(0, 0)] * (index.ndim - 1) + [(0, missing)]
        return np.pad(index, widths, constant_values=fill) if missing else index


class _Products:
    """The products of one tile size, on the device, and where their results go among all pieces."""

    def __init__(
        self, layout: _Layout, group: TileGroup, first_piece: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        items, kv_heads = len(group.rows), layout.heads.num_kv_heads
        self.rows = layout.product_rows(group.rows.shape[1])
        self.batch = kv_heads * items
        self.kv_heads = kv_heads
        self.first_piece = first_piece
        self.end_piece = first_piece + self.batch * self.rows
        self.num_full = group.num_full
        self.queries, self.entries, first, seen = _to_device(
            [
                layout.query_index(group).ravel(),
                layout.slot_index(group.slots).ravel(),
                layout.bounds(group.first_seen[group.num_full :]),
                layout.bounds(group.num_seen[group.num_full :]),
            ],
            device,
        )
        key = torch.arange(KEY_BLOCK, device=device)
        hidden = (key < first[..., None]) | (key >= seen[..., None])
        self.mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)

    def compute(self, pool: torch.Tensor, queries: torch.Tensor, scale: float, pieces: _Pieces) -> None:
        """Compute these products' pieces.

        Rows that see nothing of a block, and padding, come out as NaN; no row of the result reads those pieces.
        """
        size = pool.shape[-1]
        taken = pool.index_select(0, self.entries).to(queries.dtype).view(2, self.batch, KEY_BLOCK, size)
        query = queries.index_select(0, self.queries).view(self.batch, self.rows, size)
        scores = scaled_product(query, taken[0], scale)
        scores.view(self.kv_heads, -1, self.rows, KEY_BLOCK)[:, self.num_full :].add_(self.mask)
        maxima = self._part(pieces.maxima)
        torch.amax(scores, -1, out=maxima)
        scores.sub_(maxima[..., None]).exp_()
        torch.sum(scores, -1, out=self._part(pieces.sums))
        torch.bmm(scores, taken[1], out=self._part(pieces.values))

    def _part(self, pieces: torch.Tensor) -> torch.Tensor:
        """These products' part of all pieces, [K * items, M, …], as a view."""
        part = pieces[self.first_piece : self.end_piece]
        return part.view(self.batch, self.rows, *pieces.shape[1:])


class _Pieces:
    """Scratch for the pieces of all products, and how they add up to rows.

    For each piece the largest score, the sum of exp(score - largest), and the values weighted by these. Behind the
    last there are a piece that adds nothing and the one piece of padding rows.
    """

    def __init__(
        self, index: IntArray, num_pieces: int, head_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.maxima = torch.full((num_pieces + 2,), -torch.inf, dtype=dtype, device=device)
        self.sums = torch.zeros(num_pieces + 2, dtype=dtype, device=device)
        self.values = torch.zeros(num_pieces + 2, head_size, dtype=dtype, device=device)
        self.maxima[-1] = 0.0
        self.sums[-1] = 1.0
        (self._index,) = _to_device([index.ravel()], device)
        self._per_row = index.shape[-1]

    def rows(self) -> torch.Tensor:
        """[num_rows * H, D] the softmax-weighted mean of the values, from a row's pieces brought to one maximum."""
        maxima = self._by_row(self.maxima)
        weights = maxima.sub_(maxima.amax(-1, keepdim=True)).exp_()
        sums = _pairwise_sum(self._by_row(self.sums).mul_(weights))
        return _pairwise_sum(self._by_row(self.values).mul_(weights[..., None])).div_(sums[:, None])

    def _by_row(self, pieces: torch.Tensor) -> torch.Tensor:
        """[num_rows * H, pieces a row, …]"""
        return pieces.index_select(0, self._index).view(-1, self._per_row, *pieces.shape[1:])


class _Forward:
    """One forward's index tensors and scratch, used by every layer."""

    def __init__(
        self, layout: _Layout, plan: AttentionPlan, slot_mapping: IntArray, num_rows: int, like: torch.Tensor
    ) -> None:
        self._heads = layout.heads
        self._num_new = len(slot_mapping)
        self._dtype = compute_dtype(like.dtype)
        self._scale = layout.heads.head_size**-0.5
        groups = [part for group in plan.groups for part in layout.slices(group)]
        self._products: list[_Products] = []
        num_pieces = 0
        for group in groups:
            self._products.append(_Products(layout, group, num_pieces, self._dtype, like.device))
            num_pieces = self._products[-1].end_piece
        index = _piece_index(layout, groups, self._products, num_rows, plan.max_pieces)
        self._pieces = _Pieces(index, num_pieces, layout.heads.head_size, self._dtype, like.device)
        (self._written,) = _to_device([layout.slot_index(slot_mapping).T.ravel()], like.device)

    def attend(self, pool: torch.Tensor, qkv: torch.Tensor) -> torch.Tensor:
        """`pool`: [2K * slots, D] one layer's entries; `qkv`: [num_rows, H + 2K, D]. Returns [num_rows, H * D]."""
        size = self._heads.head_size
        pool.index_copy_(0, self._written, qkv[: self._num_new, self._heads.num_heads :].reshape(-1, size))
        queries = qkv.view(-1, size).to(self._dtype)
        for products in self._products:
            products.compute(pool, queries, self._scale, self._pieces)
        return self._pieces.rows().view(len(qkv), -1).to(qkv.dtype)


def _piece_index(
    layout: _Layout, groups: Sequence[TileGroup], products: Sequence[_Products], num_rows: int, max_pieces: int
) -> IntArray:
    """[num_rows, K, H / K, max_pieces] the pieces of each head of each row.

    A row with fewer pieces than others is filled up with the piece that adds nothing, a padding row with its own.
    """
    kv_heads, queries = layout.heads.num_kv_heads, layout.heads.queries_per_kv
    num_pieces = products[-1].end_piece
    index = np.full((num_rows, kv_heads, queries, max_pieces), num_pieces, dtype=np.int64)
    used = np.zeros(num_rows, dtype=np.bool_)
    for group, product in zip(groups, products, strict=True):
        item, place = np.nonzero(group.pieces >= 0)
        row = group.rows[item, place]
        used[row] = True
        within = item * product.rows + place * queries
        per_head = np.arange(kv_heads)[:, None] * (product.batch // kv_heads * product.rows) + np.arange(queries)
        index[row, :, :, group.pieces[item, place]] = product.first_piece + within[:, None, None] + per_head
    index[~used, ..., 0] = num_pieces + 1
    return index


def _pairwise_sum(pieces: torch.Tensor) -> torch.Tensor:
    """Sum over dimension 1, a power of two, neighbours first: zeros at its end do not change the result."""
    while pieces.shape[1] > 1:
        pieces = pieces[:, 0::2] + pieces[:, 1::2]
    return pieces[:, 0]


def _to_device(arrays: Sequence[IntArray], device: torch.device) -> list[torch.Tensor]:
    """The arrays as tensors on the device, in one copy."""
    flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays])).to(device, non_blocking=True)
    parts = flat.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
