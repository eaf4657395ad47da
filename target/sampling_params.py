"""What a request asks of sampling: plain data, imported by every room, without torch."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

GREEDY_BELOW = 1e-5
MAX_LOGPROBS = 1000
"""Most alternatives that a request may have reported for a token, whatever the vocabulary."""
MAX_TOP_K = 2**63 - 1
"""Largest `top_k`; from the size of the vocabulary on it keeps every token."""
MAX_SEED = 2**64 - 1


class Range(NamedTuple):
    """The numbers from `low` to `high`, which neither NaN nor an infinity is among."""

    low: float
    high: float
    is_open: bool = False
    """Whether `low` itself is left out."""

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int | float) and self.low <= value <= self.high and not self._is_left_out(value)

    def __str__(self) -> str:
        if self.is_open:
            return f"above {self.low:g} and at most {self.high:g}"
        return f"from {self.low:g} to {self.high:g}"

    def _is_left_out(self, value: float) -> bool:
        return self.is_open and value == self.low


RANGES = {
    "temperature": Range(0.0, 2.0),
    "top_p": Range(0.0, 1.0, is_open=True),
    "min_p": Range(0.0, 1.0),
    "presence_penalty": Range(-2.0, 2.0),
    "frequency_penalty": Range(-2.0, 2.0),
    "repetition_penalty": Range(0.001, 10.0),
}
"""What each number of `SamplingParams` may be; a smaller repetition penalty would lift logits beyond a float32."""
BIAS = Range(-100.0, 100.0)
"""What `logit_bias` may add to a logit."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen. Values are checked where they enter: by the service's schema and by the engine.

    Order of effect on the target's logits, at every drafted position alike: `logit_bias`, the ban on stop tokens
    below `min_tokens`, repetition, presence and frequency penalties, division by `temperature`, then on the tempered
    distribution `min_p`, `top_k`, `top_p`, and last the coupled Gumbel noise of (`seed`, position, token id).
    """

    temperature: float = 1.0
    """0 is greedy: the same rule without noise. So is all below `GREEDY_BELOW`, where a division may overflow."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output; presence and frequency penalties are over the output alone."""
    logit_bias: dict[int, float] = {}
    seed: int = 0
    """Unsigned 64 bits. Tokens depend on the request and this number alone."""
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    """Number of most likely alternatives to report beside each emitted token's own logprob; None reports nothing.

    Logprobs are those of the target's own distribution, before bias, penalties, temperature and filters."""

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, without noise."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_edits(self) -> bool:
        """Whether logits may be edited before the choice: by a bias, penalties, or stop tokens that come too early."""
        return bool(self.logit_bias) or self.has_penalties or self.min_tokens > 0

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens seen so far."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def all_stop_token_ids(self, eos_token_ids: tuple[int, ...]) -> frozenset[int]:
        """Tokens that end the output: the request's own, and the model's unless they are ignored."""
        return frozenset(self.stop_token_ids if self.ignore_eos else (*self.stop_token_ids, *eos_token_ids))
