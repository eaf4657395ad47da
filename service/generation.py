"""What a request asks for: prompts as token ids, how to sample, and the sequences that makes."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from speculation.messages import SamplingParams, SpeculationConfig, Submit

SEED_SPAN = 2**64
"""Seeds are unsigned numbers of 64 bits."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a request."""

    token_ids: list[int]
    text: str | None
    """As the client wrote it; None for one that came as token ids, or was truncated."""
    max_tokens: int | None = None
    """Most tokens that may be generated for this prompt, where that is less than the request's `max_tokens`."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What one request asks for: every prompt `n` times, which is one choice each."""

    id: str
    prompts: tuple[Prompt, ...]
    n: int
    sampling: SamplingParams
    """Of the first choice; choice i has the seed + i."""
    stop: tuple[str, ...] = ()
    end_of_turn: int | None = None
    """Token that ends the answer as the model's own stop tokens do, unless the request ignores those."""
    speculation: SpeculationConfig | None = None
    prediction_token_ids: tuple[int, ...] = ()
    priority: int = 0
    cache_salt: str = ""
    echo: bool = False
    is_scoring: bool = False
    """Nothing is to be generated: the prompt comes back, with logprobs if asked for."""
    is_continuation: bool = False
    """The answer goes on where the prompt ends, and a space at its start belongs to it."""
    prompt_logprobs: int | None = None
    """Number of alternatives that are reported for each token of the prompt; None reports nothing."""
    shows_special_tokens: bool = False
    """Whether control tokens are part of the text."""
    shows_stop: bool = False
    """Whether the stop string or stop token that ends the answer is part of its text."""
    ignored_fields: tuple[str, ...] = ()
    """Paths of the request's fields that were left out."""

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    def prompt_of(self, choice: int) -> Prompt:
        return self.prompts[choice // self.n]

    def submits(self) -> list[Submit]:
        """One sequence a choice, in order."""
        return [
            Submit(
                request_id=f"{self.id}-{choice}",
                prompt_token_ids=self.prompt_of(choice).token_ids,
                sampling=self._sampling_of(choice),
                speculation=self.speculation,
                priority=self.priority,
                cache_salt=self.cache_salt,
                prompt_logprobs=self._num_prompt_logprobs,
                prediction_token_ids=list(self.prediction_token_ids),
            )
            for choice in range(self.num_choices)
        ]

    @property
    def _num_prompt_logprobs(self) -> int | None:
        """Number of alternatives that the engine is asked for: for the echoed prompt, and for `prompt_logprobs`."""
        wanted = [self.prompt_logprobs, self.sampling.logprobs if self.echo else None]
        return max((number for number in wanted if number is not None), default=None)

    def _sampling_of(self, choice: int) -> SamplingParams:
        seed = (self.sampling.seed + choice) % SEED_SPAN
        max_tokens = self.prompt_of(choice).max_tokens or self.sampling.max_tokens
        min_tokens = min(self.sampling.min_tokens, max_tokens)
        return msgspec.structs.replace(
            self.sampling,
            seed=seed,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=self._stop_token_ids,
        )

    @property
    def _stop_token_ids(self) -> tuple[int, ...]:
        """The request's own, and the end of a turn unless the model's stop tokens are ignored."""
        own = self.sampling.stop_token_ids
        if self.end_of_turn is None or self.sampling.ignore_eos or self.end_of_turn in own:
            return own
        return (*own, self.end_of_turn)
