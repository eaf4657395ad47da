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
FIRST_ROW, NUM_ROWS, FIRST_SPLIT, END_SPLIT, SEQUENCE, PATH_FROM, PATH_AT = range(7)
"""An item's fields: its rows, its splits, its sequence, the first logical index that lies on the row's path in the
draft tree, and where its path's slots begin. The eighth is nothing."""
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
    num_splits = spans.end_block - spans.first_block
    needed = np.add.reduceat(num_splits, batch.row_starts[:-1])
    wants_pieces = lengths < MANY_ROWS
    whole = ~(wants_pieces & (np.cumsum(needed * wants_pieces) <= shape.max_pieces))
    paths, path_of = _paths(batch, spans.in_slot_order)
    tiles = _tiles(batch, spans, path_of, whole, shape.tile_rows)
    is_whole = whole[tiles[:, SEQUENCE]]
    items = np.concatenate([tiles[is_whole], _one_split_each(tiles[~is_whole])])

    row_is_whole = np.repeat(whole, lengths)
    pieces = np.where(row_is_whole, 0, num_splits)
    rows = np.zeros((num_rows, ROW_FIELDS), np.int64)
    filled = rows[: len(pieces)].T
    filled[0], filled[1], filled[2] = spans.first_key, spans.visible, np.cumsum(pieces) - pieces
    filled[3] = np.where(row_is_whole, WHOLE, pieces)
    slots = np.zeros(num_rows, np.int64)
    slots[: len(batch.slot_mapping)] = batch.slot_mapping
    return _packed(front, batch.block_tables, items, rows, paths, slots)


def ranges(starts: IntArray, counts: IntArray) -> IntArray:
    """starts[0], starts[0] + 1, …, counts[0] of them, then from starts[1], and so on."""
    ends = np.cumsum(counts)
    places: IntArray = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - counts), counts)
    return places


def _tiles(
    batch: ForwardBatch, spans: RowSpans, path_of: IntArray, whole: npt.NDArray[np.bool_], size: int
) -> IntArray:
    """[tiles, ITEM_FIELDS] runs of neighbouring rows of one sequence, and the splits they go through.

    `PATH_AT` is the row's place among the paths.
    """
    starts, lengths = batch.row_starts[:-1], np.diff(batch.row_starts)
    if spans.in_slot_order.all():
        return _cut(spans, starts, lengths, size)
    in_order = np.add.reduceat(spans.in_slot_order.astype(np.int64), starts)
    branching = lengths - in_order
    base = batch.num_computed + batch.chain_lens
    # Before the tree all rows of a sequence see the same keys in the same order.
    tree_split = base // spans.block
    before = _cut(spans, starts + in_order, np.where(whole, 0, branching), size)
    before[:, END_SPLIT] = np.minimum(before[:, END_SPLIT], tree_split[before[:, SEQUENCE]])
    alone = _cut(spans, starts + in_order, branching, 1)
    sequence = alone[:, SEQUENCE]
    alone[:, FIRST_SPLIT] = np.maximum(alone[:, FIRST_SPLIT], np.where(whole, 0, tree_split)[sequence])
    alone[:, PATH_FROM] = base[sequence]
    alone[:, PATH_AT] = path_of[alone[:, FIRST_ROW]]
    shared = _cut(spans, starts, in_order, size)
    return np.concatenate([shared, before[before[:, FIRST_SPLIT] < before[:, END_SPLIT]], alone])


def _cut(spans: RowSpans, starts: IntArray, counts: IntArray, size: int) -> IntArray:
    """Rows [start, start + count) of each sequence in tiles of `size`, none of them on a path."""
    per_sequence = -(-counts // size)
    sequence = np.repeat(np.arange(len(starts)), per_sequence)
    tiles = np.zeros((len(sequence), ITEM_FIELDS), np.int64)
    if len(tiles):
        within = ranges(np.zeros_like(counts), per_sequence) * size
        fields = tiles.T
        fields[FIRST_ROW] = starts[sequence] + within
        fields[NUM_ROWS] = num_rows = np.minimum(counts[sequence] - within, size)
        fields[SEQUENCE], fields[PATH_FROM] = sequence, NO_PATH
        row, edges = ranges(fields[FIRST_ROW], num_rows), np.cumsum(num_rows) - num_rows
        fields[FIRST_SPLIT] = np.minimum.reduceat(spans.first_block[row], edges)
        fields[END_SPLIT] = np.maximum.reduceat(spans.end_block[row], edges)
    return tiles


def _one_split_each(tiles: IntArray) -> IntArray:
    """Every tile once for each of its splits."""
    counts = tiles[:, END_SPLIT] - tiles[:, FIRST_SPLIT]
    each = np.repeat(tiles, counts, axis=0)
    each[:, FIRST_SPLIT] = ranges(tiles[:, FIRST_SPLIT], counts)
    each[:, END_SPLIT] = each[:, FIRST_SPLIT] + 1
    return each


def _paths(batch: ForwardBatch, in_slot_order: npt.NDArray[np.bool_]) -> tuple[IntArray, IntArray]:
    """[B, MAX_TREE_SIZE] for rows behind a branch the slots of their path by depth; [T] each row's place among them."""
    branching = np.flatnonzero(~in_slot_order)
    path_of = np.zeros(len(in_slot_order), np.int64)
    if not len(branching):
        return np.empty((0, MAX_TREE_SIZE), np.int64), path_of
    path_of[branching] = np.arange(len(branching))
    seen = batch.tree_masks[branching, None] >> np.arange(MAX_TREE_SIZE) & 1
    nodes = np.argsort(1 - seen, axis=1, kind="stable")
    sequence = np.searchsorted(batch.row_starts, branching, side="right") - 1
    tree_start = batch.row_starts[sequence] + batch.chain_lens[sequence]
    # Behind the end of a path stand nodes that nobody asks for; they need only be rows.
    return batch.slot_mapping[np.minimum(tree_start[:, None] + nodes, len(batch.slot_mapping) - 1)], path_of


def _packed(
    front: IntArray, tables: IntArray, items: IntArray, rows: IntArray, paths: IntArray, slots: IntArray
) -> npt.NDArray[np.int32]:
    """Everything end to end, behind a header that says where each part begins."""
    items_at = HEADER + len(front)
    rows_at = items_at + items.size
    tables_at = rows_at + rows.size
    slots_at = tables_at + tables.size
    items[:, PATH_AT] = items[:, PATH_AT] * MAX_TREE_SIZE + slots_at + slots.size
    header = np.array([len(items), items_at, rows_at, tables_at, tables.shape[1], slots_at])
    parts = (header, front, items.ravel(), rows.ravel(), tables.ravel(), slots, paths.ravel())
    return np.concatenate(parts, dtype=np.int32, casting="same_kind")
