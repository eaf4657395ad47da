"""The plan of one forward's attention as numbers on the device: what the kernels of `attention_kernels` read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from target.attention_plan import RowSpans
from target.batch import MAX_TREE_SIZE, ForwardBatch, IntArray

HEADER = 6
"""Number of items; where items, rows and block tables begin; width of a table; where the rows' slots begin."""
ITEM_FIELDS = 8
"""First row, number of rows, first split, end split, sequence, first logical index that lies on the row's path in the
draft tree, where its path's slots begin, nothing."""
ROW_FIELDS = 4
"""First key, one behind the last key, first piece, number of pieces: 0 for padding, `WHOLE` where an item finishes."""
WHOLE = -1
NO_PATH = np.iinfo(np.int32).max
MANY_ROWS = 64
"""New tokens of a sequence that keep the device busy without splitting their keys among programs."""


@dataclass(frozen=True, slots=True)
class WorkShape:
    """`tile_rows`: rows of a tile; `split`: keys of a split; `max_pieces`: rows' splits that may be reduced apart."""

    tile_rows: int
    split: int
    max_pieces: int


@dataclass(slots=True)
class _Tiles:
    """Runs of neighbouring rows of one sequence, and the splits they go through."""

    first_row: IntArray
    num_rows: IntArray
    first_split: IntArray
    end_split: IntArray
    sequence: IntArray
    is_path: npt.NDArray[np.bool_]

    @classmethod
    def joined(cls, parts: list[_Tiles]) -> _Tiles:
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__slots__))

    def taken(self, index: npt.NDArray[np.bool_] | IntArray) -> _Tiles:
        return _Tiles(*(getattr(self, name)[index] for name in self.__slots__))

    def one_split_each(self) -> _Tiles:
        """Every tile once for each of its splits."""
        counts = self.end_split - self.first_split
        each = self.taken(np.repeat(np.arange(len(counts)), counts))
        each.first_split = ranges(self.first_split, counts)
        each.end_split = each.first_split + 1
        return each


def plan_work(
    batch: ForwardBatch, num_rows: int, *, front: IntArray, window: int | None, shape: WorkShape
) -> npt.NDArray[np.int32]:
    """The plan of a batch padded to `num_rows` rows; `front` stands right behind the header.

    Rows up to the first branch of a draft tree see their keys in the order of the block table and share tiles. Rows
    behind it do so for the splits before the tree, and each is a tile of its own from there on, its keys found along
    its path. Sequences are reduced in pieces, first come first served, while there is room and few rows.
    """
    spans = RowSpans(batch, shape.split, window)
    lengths = np.diff(batch.row_starts)
    in_order = np.add.reduceat(spans.in_slot_order.astype(np.int64), batch.row_starts[:-1])
    num_splits = spans.end_block - spans.first_block
    needed = np.add.reduceat(num_splits, batch.row_starts[:-1])
    wants_pieces = lengths < MANY_ROWS
    whole = ~(wants_pieces & (np.cumsum(np.where(wants_pieces, needed, 0)) <= shape.max_pieces))
    tiles = _tiles(batch, spans, in_order, whole, shape.tile_rows)
    is_whole = whole[tiles.sequence]
    items = _Tiles.joined([tiles.taken(is_whole), tiles.taken(~is_whole).one_split_each()])

    row_is_whole = np.repeat(whole, lengths)
    pieces = np.where(row_is_whole, 0, num_splits)
    rows = np.zeros((num_rows, ROW_FIELDS), np.int64)
    rows[: len(pieces)] = np.stack(
        (spans.first_key, spans.visible, np.cumsum(pieces) - pieces, np.where(row_is_whole, WHOLE, pieces)), axis=1
    )
    paths, path_of = _paths(batch, spans.in_slot_order)
    slots = np.zeros(num_rows, np.int64)
    slots[: len(batch.slot_mapping)] = batch.slot_mapping
    return _packed(front, batch, items, rows, paths, path_of, slots)


def ranges(starts: IntArray, counts: IntArray) -> IntArray:
    """starts[0], starts[0] + 1, …, counts[0] of them, then from starts[1], and so on."""
    ends = np.cumsum(counts)
    places: IntArray = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - counts), counts)
    return places


def _tiles(batch: ForwardBatch, spans: RowSpans, in_order: IntArray, whole: npt.NDArray[np.bool_], size: int) -> _Tiles:
    starts, ends = batch.row_starts[:-1], batch.row_starts[1:]
    sequences = np.arange(len(starts))
    shared = _cut(spans, starts, in_order, sequences, size)
    branching = ends - starts - in_order
    if not branching.any():
        return shared
    # Before the tree all rows of a sequence see the same keys in the same order.
    tree_split = (batch.num_computed + batch.chain_lens) // spans.block
    before = _cut(spans, starts + in_order, np.where(whole, 0, branching), sequences, size)
    before.end_split = np.minimum(before.end_split, tree_split[before.sequence])
    alone = _cut(spans, starts + in_order, branching, sequences, 1)
    since = np.where(whole, 0, tree_split)[alone.sequence]
    alone.first_split = np.maximum(alone.first_split, since)
    alone.is_path[:] = True
    return _Tiles.joined([shared, before.taken(before.first_split < before.end_split), alone])


def _cut(spans: RowSpans, starts: IntArray, counts: IntArray, sequences: IntArray, size: int) -> _Tiles:
    """Rows [start, start + count) of each sequence in tiles of `size`."""
    per_sequence = -(-counts // size)
    sequence = np.repeat(sequences, per_sequence)
    within = ranges(np.zeros_like(counts), per_sequence)
    first_row = starts[sequence] + within * size
    num_rows = np.minimum(counts[sequence] - within * size, size)
    row = ranges(first_row, num_rows)
    edges = np.cumsum(num_rows) - num_rows
    empty = np.empty(0, np.int64)
    first = np.minimum.reduceat(spans.first_block[row], edges) if len(row) else empty
    end = np.maximum.reduceat(spans.end_block[row], edges) if len(row) else empty
    return _Tiles(first_row, num_rows, first, end, sequence, np.zeros(len(sequence), np.bool_))


def _paths(batch: ForwardBatch, in_slot_order: npt.NDArray[np.bool_]) -> tuple[IntArray, IntArray]:
    """[B, MAX_TREE_SIZE] for rows behind a branch the slots of their path by depth; [T] each row's place among them."""
    branching = np.flatnonzero(~in_slot_order)
    path_of = np.zeros(len(in_slot_order), np.int64)
    path_of[branching] = np.arange(len(branching))
    if not len(branching):
        return np.empty((0, MAX_TREE_SIZE), np.int64), path_of
    seen = batch.tree_masks[branching, None] >> np.arange(MAX_TREE_SIZE) & 1
    nodes = np.argsort(1 - seen, axis=1, kind="stable")
    sequence = np.searchsorted(batch.row_starts, branching, side="right") - 1
    tree_start = batch.row_starts[sequence] + batch.chain_lens[sequence]
    # Behind the end of a path stand nodes that nobody asks for; they need only be rows.
    return batch.slot_mapping[np.minimum(tree_start[:, None] + nodes, len(batch.slot_mapping) - 1)], path_of


def _packed(
    front: IntArray,
    batch: ForwardBatch,
    items: _Tiles,
    rows: IntArray,
    paths: IntArray,
    path_of: IntArray,
    slots: IntArray,
) -> npt.NDArray[np.int32]:
    """Everything end to end, behind a header that says where each part begins."""
    num_items, tables = len(items.first_row), batch.block_tables
    sizes = np.array([HEADER + len(front), num_items * ITEM_FIELDS, rows.size, tables.size, slots.size, paths.size])
    _, items_at, rows_at, tables_at, slots_at, paths_at = (np.cumsum(sizes) - sizes).tolist()
    base = (batch.num_computed + batch.chain_lens)[items.sequence]
    fields = np.zeros((num_items, ITEM_FIELDS), np.int64)
    fields[:, 0] = items.first_row
    fields[:, 1] = items.num_rows
    fields[:, 2] = items.first_split
    fields[:, 3] = items.end_split
    fields[:, 4] = items.sequence
    fields[:, 5] = np.where(items.is_path, base, NO_PATH)
    fields[:, 6] = paths_at + path_of[items.first_row] * MAX_TREE_SIZE
    header = np.array([num_items, items_at, rows_at, tables_at, tables.shape[1], slots_at])
    parts = (header, front, fields, rows, tables, slots, paths)
    return np.concatenate([part.ravel() for part in parts], dtype=np.int32, casting="same_kind")
