"""What a request asks of sampling: plain data, imported by every room, without torch."""

from __future__ import annotations

import msgspec

GREEDY_BELOW = 1e-5


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen. Values are validated where they enter (the service's wire schema).

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
