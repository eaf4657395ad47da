"""One sequence on its way through the pool: what was asked for, what was delivered, and where it runs now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from service.engine_client import OutputStream
from speculation.messages import RequestMetrics, SequenceOutput, Submit

if TYPE_CHECKING:
    from service.pool.member import Member

STEADY_OUTPUTS = 4
"""An engine that brought so many outputs of a sequence did not die of taking it."""


class Flight:
    """Survives the engines it runs on: tokens depend on the request alone, so another one can go on from any of them.

    A life is the time on one engine. One that ends early, by the engine's death, is a strike: the sequence may be what
    killed it. A longer life clears all strikes, and one spent in the engine's queue says nothing.
    """

    def __init__(self, stream: OutputStream, submit: Submit, hashes: Sequence[bytes] = ()) -> None:
        """`hashes` are those of the blocks of its prompt that a prefix cache could hold."""
        self.stream = stream
        self.submit = submit
        self.hashes = hashes
        self.num_uncached_tokens = len(submit.prompt_token_ids)
        """Prompt tokens that its engine probably has to compute."""
        self.member: Member | None = None
        """None while it waits for an engine."""
        self.is_aborted = False
        self.num_strikes = 0
        self.placed_at = 0.0
        self.waits_since = 0.0
        self.refused_by: set[str] = set()
        """Engines whose queue was full."""
        self._token_ids: list[int] = list(submit.output_token_ids)
        self._has_prompt_logprobs = False
        self._num_outputs = 0

    @property
    def request_id(self) -> str:
        return self.submit.request_id

    @property
    def prompt_key(self) -> bytes:
        """Equal for equal prompts."""
        return self.hashes[-1] if self.hashes else b""

    @property
    def has_begun(self) -> bool:
        """Whether tokens of it were delivered; then a full queue is something to wait for, not to report."""
        return len(self._token_ids) > len(self.submit.output_token_ids)

    @property
    def is_prefilling(self) -> bool:
        """Whether its engine has brought nothing of it yet."""
        return self._num_outputs == 0

    def remainder(self) -> Submit:
        """What is still to be done, as a fresh engine is asked for it."""
        if not self.has_begun:
            return self.submit
        prompt_logprobs = None if self._has_prompt_logprobs else self.submit.prompt_logprobs
        return msgspec.structs.replace(
            self.submit, output_token_ids=list(self._token_ids), prompt_logprobs=prompt_logprobs
        )

    def begin_life(self, member: Member, now: float) -> None:
        self.member, self.placed_at = member, now
        self._num_outputs = 0

    def end_life(self, *, was_running: bool) -> None:
        """Its engine has died. `was_running` is False if it was surely still in the queue."""
        self.member = None
        if self._num_outputs < STEADY_OUTPUTS and (was_running or self._num_outputs):
            self.num_strikes += 1

    def deliver(self, output: SequenceOutput) -> float | None:
        """Pass an output on. Returns the seconds since the last one, if there was one."""
        self._token_ids += output.token_ids
        self._has_prompt_logprobs |= output.prompt_logprobs is not None
        self._num_outputs += 1
        if self._num_outputs == STEADY_OUTPUTS:
            self.num_strikes = 0
        return self.stream.put(output)

    def deliver_abort(self) -> None:
        """The last output of a sequence that was to end while no engine had it."""
        self.stream.put(SequenceOutput(request_id=self.request_id, finish_reason="abort", metrics=NO_METRICS))


NO_METRICS = RequestMetrics(
    queue_seconds=0.0,
    prefill_seconds=0.0,
    num_prefill_chunks=0,
    num_cached_tokens=0,
    num_steps=0,
    num_drafts=0,
    num_draft_tokens=0,
    num_accepted_tokens=0,
    num_prediction_tokens=0,
    num_accepted_prediction_tokens=0,
    accepted_histogram=[],
    skipped_drafts={},
    num_preemptions=0,
)
"""Of a sequence whose engine took its counts along."""
