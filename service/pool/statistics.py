"""The numbers of several engines as one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

import msgspec

from speculation.messages import STEP_SECONDS_BOUNDS, Stats

NOTHING = Stats(
    num_waiting=0,
    num_running=0,
    blocks_free=0,
    blocks_cached=0,
    blocks_in_use=0,
    counters={},
    accepted_per_position=[],
    drafted_per_position=[],
    skipped_drafts={},
    step_seconds_buckets=[0] * len(STEP_SECONDS_BOUNDS),
    step_seconds_sum=0.0,
)


class Totals:
    """What one engine counted in all its lives, so that a restart makes no total smaller."""

    def __init__(self) -> None:
        self.latest: Stats | None = None
        """Of its present life."""
        self._past = NOTHING

    def end_life(self) -> None:
        """Keep the totals of a life that has ended, and none of its gauges."""
        if self.latest is not None:
            gauges = {name: 0 for name in Stats.__struct_fields__ if name.startswith(("num_", "blocks_"))}
            rates = {"prefill_tokens_per_second": 0.0, "decode_tokens_per_second": 0.0}
            past = msgspec.structs.replace(self.latest, **gauges, **rates)
            self._past = add([self._past, past])
            self.latest = None

    @property
    def all(self) -> Stats:
        """Totals of all lives, gauges of the present one."""
        return self._past if self.latest is None else add([self._past, self.latest])


def add(several: Sequence[Stats]) -> Stats:
    """Every number the sum over `several`."""
    return Stats(
        num_waiting=sum(stats.num_waiting for stats in several),
        num_running=sum(stats.num_running for stats in several),
        blocks_free=sum(stats.blocks_free for stats in several),
        blocks_cached=sum(stats.blocks_cached for stats in several),
        blocks_in_use=sum(stats.blocks_in_use for stats in several),
        counters=_by_key(stats.counters for stats in several),
        accepted_per_position=_by_position(stats.accepted_per_position for stats in several),
        drafted_per_position=_by_position(stats.drafted_per_position for stats in several),
        skipped_drafts={
            reason: int(count) for reason, count in _by_key(stats.skipped_drafts for stats in several).items()
        },
        step_seconds_buckets=_by_position(stats.step_seconds_buckets for stats in several),
        step_seconds_sum=sum(stats.step_seconds_sum for stats in several),
        prefill_tokens_per_second=sum(stats.prefill_tokens_per_second for stats in several),
        decode_tokens_per_second=sum(stats.decode_tokens_per_second for stats in several),
    )


def _by_key(several: Iterable[dict[str, float]] | Iterable[dict[str, int]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for each in several:
        for key, value in each.items():
            total[key] = total.get(key, 0.0) + value
    return total


def _by_position(several: Iterable[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*several, fillvalue=0)]
