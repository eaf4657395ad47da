"""The `metrics` of a response: how guessing went, and where the time went."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from speculation.messages import RequestMetrics, SpeculationConfig


class SpeculativeDecoding(msgspec.Struct, frozen=True, kw_only=True):
    """How guessing went, in the shape of vLLM's per-request acceptance metrics, and what it brought."""

    mean_acceptance_length: float
    """1 + accepted / drafts."""
    draft_acceptance_rate: float
    """Accepted / drafted tokens."""
    acceptance_histogram: list[int]
    """Entry i counts drafts of which exactly i tokens were accepted."""
    num_spec_steps: int
    """Drafts that were verified."""
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    """The most tokens a draft could have, where the request says; else the most that were accepted of one."""
    skipped: dict[str, int]
    """Steps without a draft, by reason."""
    saved_seconds: float
    """Estimated, against plain decoding."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request's time went, in seconds; `end_to_end` is `ttft + (tokens - 1) * tpot`."""

    queue: float
    prefill: float
    prefill_chunks: int
    cached_tokens: int
    ttft: float
    """From the request's arrival to its first token."""
    tpot: float
    """Mean time of each token after the first."""
    end_to_end: float
    tokens: int
    """Of the longest choice."""


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """The `metrics` of a response."""

    speculative_decoding: SpeculativeDecoding
    timing: Timing


def speculative_decoding(metrics: Sequence[RequestMetrics], config: SpeculationConfig | None) -> SpeculativeDecoding:
    """The sums over a request's sequences, which were asked for with `config`."""
    drafts = sum(m.num_drafts for m in metrics)
    drafted = sum(m.num_draft_tokens for m in metrics)
    accepted = sum(m.num_accepted_tokens for m in metrics)
    wanted: object = getattr(config, "num_speculative_tokens", None)
    length = max((len(m.accepted_histogram) for m in metrics), default=0)
    num_spec_tokens = wanted if isinstance(wanted, int) else max(length - 1, 0)
    histogram = [0] * max(length, num_spec_tokens + 1)
    skipped: dict[str, int] = {}
    for each in metrics:
        for index, count in enumerate(each.accepted_histogram):
            histogram[index] += count
        for reason, count in each.skipped_drafts.items():
            skipped[reason] = skipped.get(reason, 0) + count
    return SpeculativeDecoding(
        mean_acceptance_length=1.0 + accepted / drafts if drafts else 1.0,
        draft_acceptance_rate=accepted / drafted if drafted else 0.0,
        acceptance_histogram=histogram,
        num_spec_steps=drafts,
        num_accepted_draft_tokens=accepted,
        num_draft_tokens=drafted,
        num_spec_tokens=num_spec_tokens,
        skipped=skipped,
        saved_seconds=sum(m.saved_seconds for m in metrics),
    )


def timing(metrics: Sequence[RequestMetrics], *, ttft: float, decode: float, tokens: int) -> Timing:
    """The parts of a request's time. `decode` is what followed the first token; `tokens` the most of a choice."""
    tpot = decode / (tokens - 1) if tokens > 1 else 0.0
    return Timing(
        queue=max((m.queue_seconds for m in metrics), default=0.0),
        prefill=max((m.prefill_seconds for m in metrics), default=0.0),
        prefill_chunks=sum(m.num_prefill_chunks for m in metrics),
        cached_tokens=sum(m.num_cached_tokens for m in metrics),
        ttft=ttft,
        tpot=tpot,
        end_to_end=ttft + max(tokens - 1, 0) * tpot,
        tokens=tokens,
    )
