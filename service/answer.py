"""What the engine says, as what a client sees: what is new of each choice, and at the end the bill."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol
from urllib.parse import quote

import msgspec

from service.choice import Choice, ChoiceDelta
from service.engine_client import OutputStream
from service.experiments.manager import Assignment
from service.generation import Generation
from service.request_metrics import Metrics, speculative_decoding, timing
from service.tokenizer import Tokenizer
from speculation.messages import SequenceOutput

IGNORED_FIELDS = "X-Forerun-Ignored"
"""Header that names the request's fields that were left out."""
MAX_HEADER_LENGTH = 1000
"""Most characters of that header."""


class Witness(Protocol):
    """Who is told everything the engine says of a request."""

    def add(self, output: SequenceOutput) -> None: ...


class Closing(msgspec.Struct, frozen=True, kw_only=True):
    """What is known when a request has ended."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int
    num_predicted_tokens: int
    """Completion tokens that the client's predicted output had right."""
    num_mispredicted_tokens: int
    """Tokens of it that were guessed and were wrong."""
    seed: int
    metrics: Metrics


class Answer:
    """A request under way: its choices, and at the end its bill."""

    def __init__(
        self,
        generation: Generation,
        tokenizer: Tokenizer,
        stream: OutputStream,
        arrived_at: float,
        assignment: Assignment | None = None,
        witnesses: Sequence[Witness] = (),
    ) -> None:
        """`arrived_at` is when the request arrived, by `time.perf_counter`."""
        self.generation = generation
        self.assignment = assignment
        """Its arm, if it takes part in an experiment."""
        self.is_aborted = False
        """Whether `abort` has cut it off."""
        self._witnesses = witnesses
        self._stream = stream
        self._arrived_at = arrived_at
        self._choices = [Choice(index, generation, tokenizer) for index in range(generation.num_choices)]

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended and nothing is left to show."""
        return self._stream.is_finished

    @property
    def headers(self) -> Mapping[str, str]:
        """What the response says beside its body."""
        headers = {} if self.assignment is None else dict(self.assignment.headers)
        if self.generation.ignored_fields:
            headers[IGNORED_FIELDS] = _listed(self.generation.ignored_fields)
        return headers

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts; one that is answered several times counts once."""
        return sum(len(prompt.token_ids) for prompt in self.generation.prompts)

    @property
    def num_completion_tokens(self) -> int:
        """Tokens shown so far."""
        return sum(choice.num_tokens for choice in self._choices)

    async def deltas(self) -> AsyncIterator[list[ChoiceDelta]]:
        """What is new, one entry a choice that has something new, until every choice has ended.

        Raises what `OutputStream.take` raises.
        """
        while not self._stream.is_finished:
            by_choice: dict[int, list[ChoiceDelta]] = {}
            for output in await self._stream.take():
                index = int(output.request_id.rpartition("-")[2])
                by_choice.setdefault(index, []).append(self._feed(index, output))
            joined = [ChoiceDelta.join(deltas) for deltas in by_choice.values()]
            if news := [delta for delta in joined if not delta.is_empty]:
                yield news

    def abort(self) -> None:
        """End every choice; their last deltas still come."""
        self.is_aborted = True
        for submit in range(len(self._choices)):
            self._stream.abort(f"{self.generation.id}-{submit}")

    def _feed(self, index: int, output: SequenceOutput) -> ChoiceDelta:
        for witness in self._witnesses:
            witness.add(output)
        choice = self._choices[index]
        was_stopped = choice.is_stopped
        delta = choice.feed(output)
        if choice.is_stopped and not was_stopped:
            self._stream.abort(output.request_id)
        return delta

    @property
    def closing(self) -> Closing:
        """The bill. Only when `deltas` has ended."""
        metrics = [choice.metrics for choice in self._choices if choice.metrics is not None]
        firsts = [choice.metrics for choice in self._choices[:: self.generation.n] if choice.metrics is not None]
        first_at = self._stream.first_output_at or self._stream.last_output_at
        return Closing(
            num_prompt_tokens=self.num_prompt_tokens,
            num_completion_tokens=self.num_completion_tokens,
            num_cached_tokens=sum(first.num_cached_tokens for first in firsts),
            num_predicted_tokens=sum(choice.num_predicted for choice in self._choices),
            num_mispredicted_tokens=sum(m.num_prediction_tokens - m.num_accepted_prediction_tokens for m in metrics),
            seed=self.generation.sampling.seed,
            metrics=Metrics(
                speculative_decoding=speculative_decoding(metrics, self.generation.speculation),
                timing=timing(
                    metrics,
                    ttft=first_at - self._arrived_at,
                    decode=self._stream.last_output_at - first_at,
                    tokens=max(choice.num_tokens for choice in self._choices),
                ),
            ),
        )


def _listed(paths: Sequence[str]) -> str:
    """Paths of fields as a header's value: with commas between them, and percent-encoded where need be."""
    text = ", ".join(quote(path, safe="[]._-") for path in paths)
    return text if len(text) <= MAX_HEADER_LENGTH else f"{text[: MAX_HEADER_LENGTH - 3]}..."
