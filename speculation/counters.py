"""Totals an engine counts since its start, for `Stats`."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from cache_store.block_pool import BlockPool
from draft.tree import Draft
from speculation.messages import STEP_SECONDS_BOUNDS, Stats


class Rate:
    """Tokens a second over the recent past: both sums fade with the time that passes in them."""

    HALF_LIFE_SECONDS = 5.0

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def note(self, num_tokens: int, seconds: float) -> None:
        kept = 0.5 ** (seconds / self.HALF_LIFE_SECONDS)
        self._tokens = kept * self._tokens + num_tokens
        self._seconds = kept * self._seconds + seconds

    @property
    def per_second(self) -> float:
        """0 before anything was noted."""
        return self._tokens / self._seconds if self._seconds else 0.0


class EngineCounters:
    """Monotone totals. Each is changed where the thing happens, and read by `stats` alone."""

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        """steps, prompt_tokens, cached_tokens, output_tokens, drafts, draft_tokens, accepted_tokens, preemptions,
        requests, aborts; `drafts:<method>` and so on by proposer."""
        self._accepted_per_position: list[int] = []
        self._drafted_per_position: list[int] = []
        self._skipped: Counter[str] = Counter()
        self._step_buckets = [0] * (len(STEP_SECONDS_BOUNDS) + 1)
        self._step_seconds = 0.0
        self._saved_seconds = 0.0
        self._lost_seconds = 0.0
        self.prefill = Rate()
        """Rows of steps that computed prompts."""
        self.decode = Rate()
        """Tokens that steps without prompts brought."""

    def note_saved(self, seconds: float) -> None:
        """A request has ended that guessing spared so many seconds; where it cost more than it brought, below zero.

        Both are counted apart, because totals only grow.
        """
        self._saved_seconds += max(seconds, 0.0)
        self._lost_seconds += max(-seconds, 0.0)

    def note_step(self, seconds: float) -> None:
        """A step took this long."""
        self.totals["steps"] += 1
        self._step_buckets[bisect_left(STEP_SECONDS_BOUNDS, seconds)] += 1
        self._step_seconds += seconds

    def note_draft(self, draft: Draft, path: Sequence[int]) -> None:
        """A draft was verified and the nodes of `path` accepted, or there was none for a reason."""
        if not draft:
            if draft.skipped is not None:
                self._skipped[draft.skipped] += 1
            return
        for name, count in (("drafts", 1), ("draft_tokens", len(draft)), ("accepted_tokens", len(path))):
            self.totals[name] += count
            self.totals[f"{name}:{draft.source}"] += count
        deepest = max(draft.depths)
        for per_position in (self._drafted_per_position, self._accepted_per_position):
            per_position.extend([0] * (deepest - len(per_position)))
        for position in range(deepest):
            self._drafted_per_position[position] += 1
        for position in range(len(path)):
            self._accepted_per_position[position] += 1

    def stats(self, pool: BlockPool, *, num_waiting: int, num_running: int) -> Stats:
        """Everything, as the front shows it."""
        cumulative, total = [], 0
        for count in self._step_buckets[:-1]:
            total += count
            cumulative.append(total)
        return Stats(
            num_waiting=num_waiting,
            num_running=num_running,
            blocks_free=pool.num_free,
            blocks_cached=pool.num_cached,
            blocks_in_use=pool.num_in_use,
            counters={
                **{name: float(count) for name, count in self.totals.items()},
                "saved_seconds": self._saved_seconds,
                "lost_seconds": self._lost_seconds,
            },
            accepted_per_position=list(self._accepted_per_position),
            drafted_per_position=list(self._drafted_per_position),
            skipped_drafts=dict(self._skipped),
            step_seconds_buckets=cumulative,
            step_seconds_sum=self._step_seconds,
            prefill_tokens_per_second=self.prefill.per_second,
            decode_tokens_per_second=self.decode.per_second,
        )
