"""What each row of a forward attends to, cut into tiles of query rows and blocks of keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from target.batch import ForwardBatch, IntArray

NO_ROW = -1


@dataclass(frozen=True, slots=True)
class TileGroup:
    """All products of one shape: items, each a tile of up to R query rows against one key block of C slots.

    Items in which every row sees the whole block come first; there are `num_full` of them.
    """

    rows: IntArray
    """[items, R] batch rows; `NO_ROW` where the tile is not full"""
    first_seen: IntArray
    """[items, R] the first key of the block that the row sees; at least 0"""
    num_seen: IntArray
    """[items, R] one behind the last key of the block that the row sees; at most C"""
    slots: IntArray
    """[items, C]"""
    num_full: int
    pieces: IntArray
    """[items, R] which of the row's pieces, counted from the first key block it sees; -1 where it is none"""

    def part(self, start: int, end: int) -> TileGroup:
        """Items [start, end)."""
        rows, first, seen, slots = (x[start:end] for x in (self.rows, self.first_seen, self.num_seen, self.slots))
        return TileGroup(
            rows, first, seen, slots, min(max(self.num_full - start, 0), len(rows)), self.pieces[start:end]
        )


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """One forward's attention: the products, and how many of their pieces add up to a row."""

    groups: list[TileGroup]
    max_pieces: int
    """Most pieces of a row, as a power of two."""


@dataclass(slots=True)
class _Tile:
    """Query rows of one sequence that share key blocks [first_block, end_block)."""

    sequence: int
    rows: IntArray
    first_block: int
    end_block: int
    slots: IntArray | None = None
    """[(end_block - first_block) * C], where logical order is not the block table's: a row in a branching tree"""


class AttentionPlanner:
    """Plans forwards for one pool and one window.

    `key_block`: C, tokens in a key block. `tile_rows`: the numbers of query rows a tile may be padded to, ascending.
    """

    def __init__(
        self, *, block_size: int, zero_slot: int, key_block: int, tile_rows: Sequence[int], window: int | None
    ) -> None:
        self._block_size = block_size
        self._zero_slot = zero_slot
        self._key_block = key_block
        self._tile_rows = tuple(tile_rows)
        self._window = window

    def plan(self, batch: ForwardBatch) -> AttentionPlan:
        """Cut a batch into tiles and key blocks, and group products of one shape."""
        rows = RowSpans(batch, self._key_block, self._window)
        by_size: dict[int, list[_Tile]] = {}
        for sequence in range(len(batch.num_computed)):
            for tile in self._tiles(batch, rows, sequence):
                size = next(size for size in self._tile_rows if size >= len(tile.rows))
                by_size.setdefault(size, []).append(tile)
        longest = int((rows.end_block - rows.first_block).max())
        return AttentionPlan(
            [self._group(batch, rows, tiles, size) for size, tiles in sorted(by_size.items())],
            1 << (longest - 1).bit_length(),
        )

    def _tiles(self, batch: ForwardBatch, rows: RowSpans, sequence: int) -> list[_Tile]:
        """One sequence's tiles: rows in slot order together; a branching tree's full blocks, too; its tails alone."""
        start, end = int(batch.row_starts[sequence]), int(batch.row_starts[sequence + 1])
        in_order = np.flatnonzero(rows.in_slot_order[start:end]) + start
        tiles = [
            _Tile(sequence, part, int(rows.first_block[part].min()), int(rows.end_block[part].max()))
            for part in self._split(in_order)
        ]
        if len(in_order) == end - start:
            return tiles
        branching = np.flatnonzero(~rows.in_slot_order[start:end]) + start
        tail_block = int(batch.num_computed[sequence] + batch.chain_lens[sequence]) // self._key_block
        for part in self._split(branching):
            first = int(rows.first_block[part].min())
            if first < tail_block:
                tiles.append(_Tile(sequence, part, first, tail_block))
        tiles += [self._tail(batch, rows, sequence, int(row), tail_block) for row in branching]
        return tiles

    def _split(self, rows: IntArray) -> list[IntArray]:
        largest = self._tile_rows[-1]
        return [rows[i : i + largest] for i in range(0, len(rows), largest)]

    def _tail(self, batch: ForwardBatch, rows: RowSpans, sequence: int, row: int, tail_block: int) -> _Tile:
        """The last key blocks of one tree row: committed tokens, then its path, each at its logical place."""
        first, end = max(int(rows.first_block[row]), tail_block), int(rows.end_block[row])
        logical = np.arange(first * self._key_block, end * self._key_block)
        slots = self._slots(batch, np.full(len(logical), sequence), logical)
        tree_start = int(batch.row_starts[sequence] + batch.chain_lens[sequence])
        base = int(batch.num_computed[sequence] + batch.chain_lens[sequence])
        mask = int(batch.tree_masks[row])
        path = [tree_start + bit for bit in range(mask.bit_length()) if mask >> bit & 1]
        slots[logical >= base] = self._zero_slot
        kept = [(base + depth - int(logical[0]), node) for depth, node in enumerate(path) if base + depth >= logical[0]]
        slots[[place for place, _ in kept]] = batch.slot_mapping[[node for _, node in kept]]
        return _Tile(sequence, np.array([row]), first, end, slots)

    def _slots(self, batch: ForwardBatch, sequences: IntArray, logical: IntArray) -> IntArray:
        """Slots of logical indices of sequences (broadcast); the zero slot for indices behind a sequence's end."""
        total = batch.num_computed + np.diff(batch.row_starts)
        blocks = np.minimum(logical // self._block_size, batch.block_tables.shape[1] - 1)
        slots = batch.block_tables[sequences, blocks] * self._block_size + logical % self._block_size
        return np.where(logical < total[sequences], slots, self._zero_slot)

    def _group(self, batch: ForwardBatch, rows: RowSpans, tiles: list[_Tile], size: int) -> TileGroup:
        """Lay tiles of one size out as items, a tile's rows against each of its key blocks."""
        counts = np.array([tile.end_block - tile.first_block for tile in tiles])
        tile_of = np.repeat(np.arange(len(tiles)), counts)
        block = np.concatenate([np.arange(tile.first_block, tile.end_block) for tile in tiles])
        tile_rows = np.full((len(tiles), size), NO_ROW, dtype=np.int64)
        for i, tile in enumerate(tiles):
            tile_rows[i, : len(tile.rows)] = tile.rows
        item_rows = tile_rows[tile_of]
        logical = block[:, None] * self._key_block + np.arange(self._key_block)
        slots = self._slots(batch, np.array([tile.sequence for tile in tiles])[tile_of][:, None], logical)
        for i in (i for i, tile in enumerate(tiles) if tile.slots is not None):
            slots[tile_of == i] = tiles[i].slots.reshape(-1, self._key_block)  # type: ignore[union-attr]
        first = np.clip(rows.first_key[item_rows] - logical[:, :1], 0, self._key_block)
        seen = np.clip(rows.visible[item_rows] - logical[:, :1], 0, self._key_block)
        seen[item_rows == NO_ROW] = 0
        piece = block[:, None] - rows.first_block[item_rows]
        inside = (piece >= 0) & (block[:, None] < rows.end_block[item_rows]) & (item_rows != NO_ROW)
        piece = np.where(inside, piece, -1)
        partial = ((first > 0) | (seen < self._key_block)).any(axis=1)
        order = np.argsort(partial, kind="stable")
        num_full = int(len(order) - partial.sum())
        return TileGroup(item_rows[order], first[order], seen[order], slots[order], num_full, piece[order])


class RowSpans:
    """For each row of a batch the logical indices it sees, [first_key, visible), and the key blocks these lie in.

    `in_slot_order`: whether their logical order is that of the block table, as it is up to a tree's first branch.
    """

    def __init__(self, batch: ForwardBatch, key_block: int, window: int | None) -> None:
        self.block = key_block
        lengths = np.diff(batch.row_starts)
        within = np.arange(len(batch.token_ids)) - np.repeat(batch.row_starts[:-1], lengths)
        chain = np.repeat(batch.chain_lens, lengths)
        node = within - chain
        masks = batch.tree_masks
        self.in_slot_order: npt.NDArray[np.bool_] = (node < 0) | (masks == (2 << np.clip(node, 0, 62)) - 1)
        depth = np.where(node < 0, 0, np.bitwise_count(masks).astype(np.int64))
        self.visible: IntArray = np.repeat(batch.num_computed, lengths) + np.minimum(within + 1, chain) + depth
        self.first_key: IntArray = np.maximum(self.visible - window, 0) if window else np.zeros_like(self.visible)
        self.first_block: IntArray = self.first_key // key_block
        self.end_block: IntArray = (self.visible - 1) // key_block + 1
