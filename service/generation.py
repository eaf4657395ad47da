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
    """As the client wrote it; None for one that came as token ids."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What one request asks for: every prompt `n` times, which is one choice each."""

    id: str
    prompts: tuple[Prompt, ...]
    n: int
    sampling: SamplingParams
    """Of the first choice; choice i has the seed + i."""
    stop: tuple[str, ...] = ()
    speculation: SpeculationConfig | None = None
    prediction_token_ids: tuple[int, ...] = ()
    priority: int = 0
    cache_salt: str = ""
    echo: bool = False
    is_scoring: bool = False
    """Nothing is to be generated: the prompt comes back, with logprobs if asked for."""
    is_continuation: bool = False
    """The answer goes on where the prompt ends, and a space at its start belongs to it."""

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
                sampling=msgspec.structs.replace(self.sampling, seed=(self.sampling.seed + choice) % SEED_SPAN),
                speculation=self.speculation,
                priority=self.priority,
                cache_salt=self.cache_salt,
                prompt_logprobs=self.sampling.logprobs if self.echo else None,
                prediction_token_ids=list(self.prediction_token_ids),
            )
            for choice in range(self.num_choices)
        ]
