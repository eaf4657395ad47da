"""Which engine gets a request: rules over what each of them would probably do with it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

ASSUMED_PREFILL_RATE = 1000.0
"""Tokens a second of an engine that has computed nothing yet; only its ratio to the others' matters."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine has before it."""

    pending_tokens: float = 0.0
    """Prompt tokens that wait or are being computed, without those it has cached."""
    num_live: int = 0
    """Sequences that wait or run."""
    max_num_seqs: int = 0
    """How many can run at a time; 0 is not known."""
    prefill_tokens_per_second: float = 0.0
    """0 is not known."""
    sequence_seconds: float = 0.0
    """How long a sequence lasts there, about."""

    def compute_seconds(self, num_tokens: float) -> float:
        """How long so many prompt tokens take."""
        return num_tokens / (self.prefill_tokens_per_second or ASSUMED_PREFILL_RATE)

    def predict_ttft(self, num_uncached_tokens: float) -> float:
        """Seconds to the first token of a prompt of which so many tokens must be computed: the queue, then the prompt.

        Where more sequences are there than run at a time, first so many must end as are too many.
        """
        seconds = self.compute_seconds(self.pending_tokens + num_uncached_tokens)
        if self.max_num_seqs:
            too_many = max(self.num_live + 1 - self.max_num_seqs, 0)
            seconds += too_many * self.sequence_seconds / self.max_num_seqs
        return seconds


class Quote(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine would do with a request."""

    engine_id: str
    num_cached_tokens: int
    ttft: float
    """Predicted, in seconds."""
    compute_seconds: float = 0.0
    """Of them, those that computing what is not cached takes."""
    num_live: int


class Routing(Protocol):
    """A rule. `choose` is given at least one quote, always in the same order of engines."""

    def choose(self, quotes: Sequence[Quote]) -> Quote: ...


class LeastTtft:
    """The engine whose first token is predicted soonest, and of those about as soon one that holds more of the prompt.

    Computing counts three times: whoever asks waits for it, and so do those who come behind; and what it fills was
    somebody else's, who has to compute it again. So a hot prefix moves to a second engine when the queue at its holder
    is longer than computing it three times takes: before the holder is overloaded. From then on both hold it, and
    share what is asked of it.
    """

    def __init__(self, *, margin: float = 0.1, least_seconds: float = 0.002) -> None:
        """Costs that differ by less than `margin` of them and `least_seconds` are the same: predictions are rough."""
        self._margin = margin
        self._least = least_seconds
        self._turns: dict[str, int] = {}
        """When each engine was chosen last, in choices."""
        self._turn = 0

    def choose(self, quotes: Sequence[Quote]) -> Quote:
        lowest = min(_cost(quote) for quote in quotes)
        near = [quote for quote in quotes if _cost(quote) <= lowest * (1.0 + self._margin) + self._least]
        chosen = min(near, key=self._rank)
        self._turn += 1
        self._turns[chosen.engine_id] = self._turn
        return chosen

    def _rank(self, quote: Quote) -> tuple[int, int, int]:
        """Who holds the most, then who has the fewest sequences, then who waited longest."""
        return -quote.num_cached_tokens, quote.num_live, self._turns.get(quote.engine_id, 0)


def _cost(quote: Quote) -> float:
    return quote.ttft + 2 * quote.compute_seconds


class PrefixOnly:
    """The engine that holds the most of the prompt, however long its queue; among equals the one with the fewest."""

    def choose(self, quotes: Sequence[Quote]) -> Quote:
        return max(quotes, key=lambda quote: (quote.num_cached_tokens, -quote.num_live))


class RoundRobin:
    """One engine after the other."""

    def __init__(self) -> None:
        self._turn = -1

    def choose(self, quotes: Sequence[Quote]) -> Quote:
        self._turn += 1
        return quotes[self._turn % len(quotes)]


class RandomRouting:
    """Any engine."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def choose(self, quotes: Sequence[Quote]) -> Quote:
        return self._rng.choice(quotes)


ROUTINGS: dict[str, Callable[[], Routing]] = {
    "least_ttft": LeastTtft,
    "prefix_only": PrefixOnly,
    "round_robin": RoundRobin,
    "random": RandomRouting,
}
