"""Laying sequences end to end: from what each brings to a forward to the ragged batch of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from target.batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """One sequence's part of a forward: committed tokens that are not computed yet, then the nodes of a draft tree."""

    num_computed: int
    chain: Sequence[int]
    """Token ids at positions num_computed, num_computed + 1, …; at least one."""
    block_ids: Sequence[int]
    tree: Sequence[int] = ()
    """Token ids of the draft's nodes, in topological order."""
    parents: Sequence[int] = ()
    """For each node its parent node, or -1 for the last token of the chain."""
    logits_from: int | None = None
    """Logits are wanted of this entry's rows from here on (0 is the chain's first); None for none."""
    num_prompt_logits: int = 0
    """Logits are wanted of so many of its first rows as well."""


def lay_out(entries: Sequence[BatchEntry], block_size: int, feature_layers: tuple[int, ...] = ()) -> ForwardBatch:
    """The ragged batch of `entries`, in order."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    masks: list[int] = []
    logit_rows: list[int] = []
    row_starts = [0]
    for entry in entries:
        first_row, start, end = row_starts[-1], entry.num_computed, entry.num_computed + len(entry.chain)
        token_ids += entry.chain
        positions += range(start, end)
        masks += [0] * len(entry.chain)
        if entry.tree:
            token_ids += entry.tree
            positions += [end - 1 + depth for depth in depths_of(entry.parents)]
            masks += masks_of(entry.parents)
        slots += slots_of(entry.block_ids, start, end + len(entry.tree), block_size)
        row_starts.append(len(token_ids))
        logit_rows += range(first_row, first_row + entry.num_prompt_logits)
        if entry.logits_from is not None:
            logit_rows += range(first_row + entry.logits_from, row_starts[-1])
    return ForwardBatch(
        token_ids=np.array(token_ids, np.int64),
        positions=np.array(positions, np.int64),
        slot_mapping=np.array(slots, np.int64),
        row_starts=np.array(row_starts, np.int64),
        num_computed=np.array([entry.num_computed for entry in entries], np.int64),
        chain_lens=np.array([len(entry.chain) for entry in entries], np.int64),
        tree_masks=np.array(masks, np.int64),
        block_tables=_padded([entry.block_ids for entry in entries]),
        logit_rows=np.array(logit_rows, np.int64),
        feature_layers=feature_layers,
    )


def depths_of(parents: Sequence[int]) -> list[int]:
    """For each node its distance from the last token of the chain; 1 for that token's children."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def masks_of(parents: Sequence[int]) -> list[int]:
    """For each node the bits of the nodes it sees: its ancestors and itself."""
    masks: list[int] = []
    for node, parent in enumerate(parents):
        masks.append((masks[parent] if parent >= 0 else 0) | 1 << node)
    return masks


def slots_of(block_ids: Sequence[int], start: int, end: int, block_size: int) -> list[int]:
    """Slots of logical indices [start, end)."""
    return [block_ids[i // block_size] * block_size + i % block_size for i in range(start, end)]


def _padded(tables: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    """Block tables of different lengths as one array, filled up with the null block."""
    array = np.zeros((len(tables), max(map(len, tables), default=0)), np.int64)
    for row, table in zip(array, tables, strict=True):
        row[: len(table)] = table
    return array
