"""From a step plan to the model's ragged batch: rows, positions, slots, tree masks, and which rows are sampled."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from draft.tree import Draft
from speculation.scheduler import ScheduledSequence, StepPlan
from speculation.sequence import Sequence
from target.batch import ForwardBatch
from target.sampling import SamplingRow, TokenCounts


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """Where one scheduled sequence stands in the batch."""

    scheduled: ScheduledSequence
    first_row: int
    """Its rows are the chain, then the draft's nodes."""
    first_sampled: int
    """Index into the sampled rows of its root (the last committed token), its nodes following; -1 if it samples none."""
    first_prompt_logit: int
    """Index into the batch's logit rows of its first row that is scored as a prompt token; -1 if there is none."""
    num_prompt_logits: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A batch for the model, and how to read what comes back."""

    forward: ForwardBatch
    rows: tuple[SequenceRows, ...]
    sampled: tuple[SamplingRow, ...]
    sampled_logits: tuple[int, ...]
    """For each sampled row its index into the batch's logit rows."""


class StepBatchBuilder:
    """Lays the sequences of a plan end to end. Knows token ids and block tables; no request ids, no limits."""

    def __init__(self, block_size: int, eos_token_ids: tuple[int, ...], feature_layers: tuple[int, ...]) -> None:
        self._block_size = block_size
        self._eos_token_ids = eos_token_ids
        self.feature_layers = feature_layers

    def build(self, plan: StepPlan) -> StepBatch:
        """The batch of a plan; T rows in all."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        masks: list[int] = []
        logit_rows: list[int] = []
        sampled: list[SamplingRow] = []
        sampled_logits: list[int] = []
        rows: list[SequenceRows] = []
        for scheduled in plan.scheduled:
            sequence, draft, num_chain = scheduled.sequence, scheduled.draft, scheduled.num_chain
            assert sequence.table is not None
            first_row, start = len(token_ids), sequence.num_computed_tokens
            chain_end = start + num_chain
            token_ids += sequence.token_ids[start:chain_end]
            token_ids += draft.token_ids
            positions += range(start, chain_end)
            positions += [chain_end - 1 + depth for depth in draft.depths]
            slots += slots_of(sequence.table.block_ids, start, chain_end + len(draft), self._block_size)
            masks += [0] * num_chain
            masks += tree_masks(draft)
            num_prompt = self._num_prompt_logits(scheduled)
            first_prompt = len(logit_rows) if num_prompt else -1
            logit_rows += range(first_row, first_row + num_prompt)
            first_sampled = -1
            if scheduled.completes:
                first_sampled = len(sampled)
                root = first_row + num_chain - 1
                if logit_rows and logit_rows[-1] == root:
                    raise AssertionError("the root is a prompt row and a sampled row at once")
                sampled_logits += range(len(logit_rows), len(logit_rows) + 1 + len(draft))
                logit_rows += range(root, root + 1 + len(draft))
                sampled += self._sampling_rows(sequence, draft)
            rows.append(SequenceRows(scheduled, first_row, first_sampled, first_prompt, num_prompt))
        forward = ForwardBatch(
            token_ids=np.array(token_ids, np.int64),
            positions=np.array(positions, np.int64),
            slot_mapping=np.array(slots, np.int64),
            row_starts=np.array([*(r.first_row for r in rows), len(token_ids)], np.int64),
            num_computed=np.array([s.sequence.num_computed_tokens for s in plan.scheduled], np.int64),
            chain_lens=np.array([s.num_chain for s in plan.scheduled], np.int64),
            tree_masks=np.array(masks, np.int64),
            block_tables=padded([_blocks(s.sequence) for s in plan.scheduled]),
            logit_rows=np.array(logit_rows, np.int64),
            feature_layers=self.feature_layers,
        )
        return StepBatch(forward, tuple(rows), tuple(sampled), tuple(sampled_logits))

    def stop_token_ids(self, sequence: Sequence) -> frozenset[int]:
        """Tokens that end the sequence."""
        own = sequence.sampling.stop_token_ids
        return frozenset(own if sequence.sampling.ignore_eos else (*own, *self._eos_token_ids))

    def _num_prompt_logits(self, scheduled: ScheduledSequence) -> int:
        """How many of the chain's rows predict a prompt token whose logprob is wanted."""
        sequence = scheduled.sequence
        if not sequence.wants_prompt_logprobs:
            return 0
        return max(min(scheduled.num_chain, sequence.num_prompt_tokens - 1 - sequence.num_computed_tokens), 0)

    def _sampling_rows(self, sequence: Sequence, draft: Draft) -> list[SamplingRow]:
        """The root's row and one for each node; penalties and `min_tokens` hold on every one, along its own path."""
        params = sequence.sampling
        counts = None
        if sequence.output_counts is not None:
            counts = TokenCounts(sequence.prompt_set, sequence.output_counts)
        banned = tuple(self.stop_token_ids(sequence)) if params.min_tokens else ()
        rows = []
        for path in [(), *paths_of(draft)]:
            num_output = sequence.num_output_tokens + len(path)
            rows.append(
                SamplingRow(
                    params=params,
                    position=sequence.num_tokens + len(path),
                    num_output_tokens=num_output,
                    banned_token_ids=banned if num_output < params.min_tokens else (),
                    counts=counts,
                    path=path,
                )
            )
        return rows


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    """For each node the draft tokens from the root to it."""
    paths: list[tuple[int, ...]] = []
    for token_id, parent in zip(draft.token_ids, draft.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token_id))
    return paths


def tree_masks(draft: Draft) -> list[int]:
    """For each node the bits of the nodes it sees: its ancestors and itself."""
    masks: list[int] = []
    for node, parent in enumerate(draft.parents):
        masks.append((masks[parent] if parent >= 0 else 0) | 1 << node)
    return masks


def slots_of(block_ids: Seq[int], start: int, end: int, block_size: int) -> list[int]:
    """Slots of logical indices [start, end)."""
    return [block_ids[i // block_size] * block_size + i % block_size for i in range(start, end)]


def padded(tables: Seq[Seq[int]]) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Block tables of different lengths as one array, filled up with the null block."""
    array = np.zeros((len(tables), max(map(len, tables), default=0)), np.int64)
    for row, table in zip(array, tables, strict=True):
        row[: len(table)] = table
    return array


def _blocks(sequence: Sequence) -> list[int]:
    assert sequence.table is not None
    return sequence.table.block_ids
