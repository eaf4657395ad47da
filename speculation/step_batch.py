"""From a step plan to the model's ragged batch, and which of its rows are sampled."""

from __future__ import annotations

from dataclasses import dataclass

from draft.tree import Draft
from speculation.scheduler import ScheduledSequence, StepPlan
from speculation.sequence import Sequence
from target.batch import ForwardBatch
from target.layout import BatchEntry, lay_out
from target.sampling import SamplingRow, TokenCounts


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """Where one scheduled sequence stands in the batch."""

    scheduled: ScheduledSequence
    first_row: int
    """Its rows are the chain, then the draft's nodes."""
    first_sampled: int
    """Index into the sampled rows of its root (the last committed token), its nodes following; -1 for none."""
    first_logit: int
    """Index into the batch's logit rows of its first one: those scored as prompt tokens, then the sampled ones."""
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
        self.feature_layers = feature_layers
        self._block_size = block_size
        self._eos_token_ids = eos_token_ids

    def build(self, plan: StepPlan) -> StepBatch:
        """The batch of a plan."""
        entries: list[BatchEntry] = []
        rows: list[SequenceRows] = []
        sampled: list[SamplingRow] = []
        sampled_logits: list[int] = []
        num_rows = num_logits = 0
        for scheduled in plan.scheduled:
            entry = self._entry(scheduled)
            entries.append(entry)
            first_sampled = len(sampled) if scheduled.completes else -1
            rows.append(SequenceRows(scheduled, num_rows, first_sampled, num_logits, entry.num_prompt_logits))
            num_rows += len(entry.chain) + len(entry.tree)
            num_logits += entry.num_prompt_logits
            if scheduled.completes:
                sampled += self._sampling_rows(scheduled.sequence, scheduled.draft)
                sampled_logits += range(num_logits, num_logits + 1 + len(scheduled.draft))
                num_logits += 1 + len(scheduled.draft)
        forward = lay_out(entries, self._block_size, self.feature_layers)
        return StepBatch(forward, tuple(rows), tuple(sampled), tuple(sampled_logits))

    def stop_token_ids(self, sequence: Sequence) -> frozenset[int]:
        """Tokens that end the sequence."""
        return sequence.sampling.all_stop_token_ids(self._eos_token_ids)

    def _entry(self, scheduled: ScheduledSequence) -> BatchEntry:
        sequence, start = scheduled.sequence, scheduled.sequence.num_computed_tokens
        assert sequence.table is not None
        num_prompt_logits = 0
        if sequence.wants_prompt_logprobs:
            num_prompt_logits = max(min(scheduled.num_chain, sequence.num_prompt_tokens - 1 - start), 0)
        return BatchEntry(
            num_computed=start,
            chain=sequence.token_ids[start : start + scheduled.num_chain],
            block_ids=sequence.table.block_ids,
            tree=scheduled.draft.token_ids,
            parents=scheduled.draft.parents,
            logits_from=scheduled.num_chain - 1 if scheduled.completes else None,
            num_prompt_logits=num_prompt_logits,
        )

    def _sampling_rows(self, sequence: Sequence, draft: Draft) -> list[SamplingRow]:
        """The root's row and one for each node; penalties and `min_tokens` hold on every one, along its own path."""
        counts = None
        if sequence.output_counts is not None:
            counts = TokenCounts(sequence.prompt_set, sequence.output_counts)
        stops = self.stop_token_ids(sequence) if sequence.sampling.min_tokens else frozenset()
        return [
            SamplingRow.after(
                path,
                params=sequence.sampling,
                num_tokens=sequence.num_tokens,
                num_prompt_tokens=sequence.num_prompt_tokens,
                stop_token_ids=stops,
                counts=counts,
            )
            for path in ((), *paths_of(draft))
        ]


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    """For each node the draft tokens from the root to it."""
    paths: list[tuple[int, ...]] = []
    for token_id, parent in zip(draft.token_ids, draft.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token_id))
    return paths
