"""The sequence: what the engine grows, from a request's prompt to its last token."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from cache_store.block_pool import BlockTable
from draft.config import PredictionConfig, SpeculationConfig, method_of
from draft.tree import Draft
from speculation.messages import RequestMetrics, SamplingParams, Submit, TokenLogprob

PREDICTION = method_of(PredictionConfig())
"""Drafts of this source are counted apart, as OpenAI's usage does."""


@dataclass(slots=True)
class SequenceCounters:
    """What one sequence has cost so far and how its guesses fared."""

    first_scheduled: float | None = None
    prefill_end: float | None = None
    num_prefill_chunks: int = 0
    num_cached_tokens: int = 0
    num_steps: int = 0
    num_draft_tokens: int = 0
    num_prediction_tokens: int = 0
    num_accepted_prediction_tokens: int = 0
    accepted: Counter[int] = field(default_factory=Counter)
    """How many drafts had exactly so many tokens accepted."""
    skipped: Counter[str] = field(default_factory=Counter)
    num_preemptions: int = 0
    saved_seconds: float = 0.0


class Sequence:
    """One sequence's committed tokens and how far its KV cache has caught up with them.

    Facts are few; everything else is derived. `num_tokens` counts committed tokens (draft tokens never are), and every
    step lets `num_computed_tokens` catch up. When one token is left to compute, the sequence is decoding.
    """

    def __init__(self, seq_id: int, request: Submit, config: SpeculationConfig, arrival: float) -> None:
        self.seq_id = seq_id
        self.request = request
        self.config = config
        self.arrival = arrival
        self.token_ids: list[int] = [*request.prompt_token_ids, *request.output_token_ids]
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_computed_tokens = 0
        self.table: BlockTable | None = None
        """None while it waits."""
        self.finish_reason: str | None = None
        self.stop_token_id: int | None = None
        self.prompt_logprobs: list[TokenLogprob] | None = None if request.prompt_logprobs is None else []
        self.counters = SequenceCounters()
        self.output_counts: Counter[int] | None = None
        self.prompt_set: frozenset[int] = frozenset()
        if request.sampling.has_penalties:
            self.output_counts = Counter(request.output_token_ids)
            self.prompt_set = frozenset(request.prompt_token_ids)

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens it may still generate."""
        return self.sampling.max_tokens - self.num_output_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether the next step yields a token and may carry a draft."""
        return self.table is not None and self.num_uncomputed_tokens == 1

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether logprobs of prompt tokens are still to be computed."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def urgency(self) -> tuple[int, int]:
        """Sorts sequences by who is served first: priority, then arrival."""
        return self.request.priority, self.seq_id

    def append(self, token_ids: list[int]) -> None:
        """Commit tokens that the target has verified."""
        self.token_ids.extend(token_ids)
        if self.output_counts is not None:
            self.output_counts.update(token_ids)

    def note_draft(self, draft: Draft, num_accepted: int) -> None:
        """Count a verified draft, or the reason there was none."""
        if draft:
            self.counters.num_draft_tokens += len(draft)
            self.counters.accepted[num_accepted] += 1
            if draft.source == PREDICTION:
                self.counters.num_prediction_tokens += len(draft)
                self.counters.num_accepted_prediction_tokens += num_accepted
        elif draft.skipped is not None:
            self.counters.skipped[draft.skipped] += 1

    def metrics(self, now: float) -> RequestMetrics:
        """What it cost, for the client. Durations in seconds."""
        c = self.counters
        start = c.first_scheduled if c.first_scheduled is not None else now
        end = c.prefill_end if c.prefill_end is not None else now
        return RequestMetrics(
            queue_seconds=start - self.arrival,
            prefill_seconds=max(end - start, 0.0),
            num_prefill_chunks=c.num_prefill_chunks,
            num_cached_tokens=c.num_cached_tokens,
            num_steps=c.num_steps,
            num_drafts=c.accepted.total(),
            num_draft_tokens=c.num_draft_tokens,
            num_accepted_tokens=sum(accepted * count for accepted, count in c.accepted.items()),
            num_prediction_tokens=c.num_prediction_tokens,
            num_accepted_prediction_tokens=c.num_accepted_prediction_tokens,
            accepted_histogram=[c.accepted[i] for i in range(max(c.accepted, default=-1) + 1)],
            skipped_drafts=dict(c.skipped),
            num_preemptions=c.num_preemptions,
            saved_seconds=c.saved_seconds,
        )
