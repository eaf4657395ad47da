"""The latest answered requests, in numbers: what they ask and what is answered is not kept."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

import msgspec

from service.answer import Answer

NUM_KEPT = 50


class RecentRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One answered request."""

    id: str
    ended_at: float
    """Seconds since the epoch."""
    tenant: str
    """Empty where the service knows no tenants."""
    method: str
    """Of speculation."""
    experiment: str | None
    arm: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft: float
    """Seconds from arrival to the first token."""
    end_to_end: float
    """Seconds."""
    mean_acceptance_length: float
    is_aborted: bool


class RecentRequests:
    """The last `NUM_KEPT` answers, newest first."""

    def __init__(self) -> None:
        self._kept: deque[RecentRequest] = deque(maxlen=NUM_KEPT)

    def __iter__(self) -> Iterator[RecentRequest]:
        return iter(self._kept)

    def note(self, answer: Answer, method: str, tenant: str) -> None:
        """Keep the numbers of an answer that has ended."""
        closing, assignment = answer.closing, answer.assignment
        timing = closing.metrics.timing
        self._kept.appendleft(
            RecentRequest(
                id=answer.generation.id,
                ended_at=time.time(),
                tenant=tenant,
                method=method,
                experiment=None if assignment is None else assignment.experiment,
                arm=None if assignment is None else assignment.arm,
                prompt_tokens=closing.num_prompt_tokens,
                cached_tokens=closing.num_cached_tokens,
                completion_tokens=closing.num_completion_tokens,
                ttft=timing.ttft,
                end_to_end=timing.end_to_end,
                mean_acceptance_length=closing.metrics.speculative_decoding.mean_acceptance_length,
                is_aborted=answer.is_aborted,
            )
        )
