"""What is measured: a system that answers, and what is known of each answer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Protocol

import msgspec


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One conversation to be continued by the assistant."""

    messages: list[dict[str, str]]
    token_ids: list[int]
    """The same, rendered by the model's chat template."""
    num_tokens: int
    """So many tokens are generated, whatever they are."""
    seed: int


class Arrival(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that came at once."""

    seconds: float
    """Since the request was sent."""
    num_tokens: int


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What came back, and when."""

    token_ids: list[int]
    """[] where a system does not tell."""
    arrivals: list[Arrival]
    """At least one; a system that does not stream has one, at the end."""
    num_drafts: int | None = None
    """None where a system does not tell how it guessed."""
    num_accepted: int = 0
    cpu_seconds: float | None = None
    """Processor time of the server's front, where there is one."""

    @property
    def num_tokens(self) -> int:
        return sum(arrival.num_tokens for arrival in self.arrivals)

    @property
    def seconds(self) -> float:
        return self.arrivals[-1].seconds

    @property
    def ttft_seconds(self) -> float | None:
        """To the first token; None for an answer that came whole."""
        return None if self.is_whole else self.arrivals[0].seconds

    @property
    def tokens_per_second(self) -> float | None:
        """After the first tokens; None where nothing came after them."""
        first, last = self.arrivals[0], self.arrivals[-1]
        if last.seconds <= first.seconds:
            return None
        return (self.num_tokens - first.num_tokens) / (last.seconds - first.seconds)

    @property
    def gap_seconds(self) -> float | None:
        """The median time between two arrivals."""
        gaps = [after.seconds - before.seconds for before, after in pairwise(self.arrivals)]
        return median(gaps) if gaps else None

    @property
    def is_whole(self) -> bool:
        return len(self.arrivals) == 1 and self.num_tokens > 1


class System(Protocol):
    """Something that answers."""

    name: str
    method: str
    """How it speculates; "none" for plain decoding."""
    precision: str
    """Of weights and activations, and on what it runs."""

    async def answer(self, asks: Sequence[Ask]) -> list[Answer]:
        """Answer all at the same time. Raises RuntimeError where the system fails."""
