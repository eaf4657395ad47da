"""One choice of a request, from the engine's outputs to what a client sees of it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from service.generation import Generation
from service.text import TextDelta, TextStream
from service.tokenizer import Tokenizer
from speculation.messages import RequestMetrics, SequenceOutput, TokenLogprob


class ChoiceDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What is new of one choice. The first four lists are aligned: one entry a token."""

    index: int
    text: str
    token_ids: list[int]
    sources: list[str]
    """The proposer that guessed it, "target", or "prompt" for what is echoed."""
    offsets: list[int]
    """Where each token begins in the choice's text."""
    logprobs: list[TokenLogprob | None] | None = None
    """None for the first token of an echoed prompt: nothing comes before it."""
    prompt_logprobs: list[tuple[int, TokenLogprob | None]] | None = None
    """With the last delta, where the request asked for them: each prompt token's id and logprob, None for the first."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it, if the request had named it."""

    @property
    def is_empty(self) -> bool:
        return not self.text and not self.token_ids and self.finish_reason is None

    @staticmethod
    def join(deltas: Sequence[ChoiceDelta]) -> ChoiceDelta:
        """Deltas of one choice, in order, as one."""
        if len(deltas) == 1:
            return deltas[0]
        with_logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
        return ChoiceDelta(
            index=deltas[0].index,
            text="".join(delta.text for delta in deltas),
            token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
            sources=[source for delta in deltas for source in delta.sources],
            offsets=[offset for delta in deltas for offset in delta.offsets],
            logprobs=[row for rows in with_logprobs for row in rows] if with_logprobs else None,
            prompt_logprobs=deltas[-1].prompt_logprobs,
            finish_reason=deltas[-1].finish_reason,
            stop_reason=deltas[-1].stop_reason,
        )


class Choice:
    """One sequence of a request, from the engine's outputs to deltas of text."""

    def __init__(self, index: int, generation: Generation, tokenizer: Tokenizer) -> None:
        self.index = index
        self.metrics: RequestMetrics | None = None
        """What it cost, when it has ended."""
        self.num_predicted = 0
        """Tokens shown that the client's predicted output had right."""
        self._generation = generation
        self._tokenizer = tokenizer
        self._text = TextStream(
            tokenizer.spelling if generation.shows_special_tokens else tokenizer.token_bytes,
            stop=generation.stop,
            min_tokens=generation.sampling.min_tokens,
            strip_leading_space=tokenizer.strips_leading_space and not generation.is_continuation,
            shows_stop=generation.shows_stop,
        )
        self._has_begun = False
        self._offset = 0
        self._token_ids: list[int] = []
        self._sources: list[str] = []
        self._logprobs: list[TokenLogprob | None] = []
        self._prompt_logprobs: list[tuple[int, TokenLogprob | None]] | None = None

    @property
    def num_tokens(self) -> int:
        """Generated tokens that the client was shown; what its stop condition cut off does not count."""
        return self._text.num_tokens

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended it; what the engine still says is dropped."""
        return self._text.is_stopped

    def feed(self, output: SequenceOutput) -> ChoiceDelta:
        """What one output of the engine adds."""
        generation = self._generation
        echo = [] if self._has_begun or not generation.echo else [self._echo(output)]
        self._has_begun = True
        rows = self._prompt_rows(output, generation.prompt_logprobs)
        if rows is not None:
            self._prompt_logprobs = list(zip(generation.prompt_of(self.index).token_ids, rows, strict=True))
        self._keep(output)
        delta = self._text.feed(() if generation.is_scoring else self._fed(output))
        if output.finish_reason is None:
            return ChoiceDelta.join([*echo, self._cut(delta)])
        self.metrics = output.metrics
        rest = self._text.finish()
        delta = TextDelta(delta.text + rest.text, delta.offsets + rest.offsets)
        last = self._cut(delta, *self._why_finished(output))
        if self._prompt_logprobs is not None:
            last = msgspec.structs.replace(last, prompt_logprobs=self._prompt_logprobs)
        return ChoiceDelta.join([*echo, last])

    def _fed(self, output: SequenceOutput) -> list[int]:
        """The output's tokens without the one that only says that it is over."""
        if output.stop_token_id is None or self._shows(output.stop_token_id):
            return output.token_ids
        return output.token_ids[:-1]

    def _shows(self, stop_token_id: int) -> bool:
        """Whether the token that ended the output is part of the text."""
        return self._generation.shows_stop and stop_token_id in self._generation.sampling.stop_token_ids

    def _keep(self, output: SequenceOutput) -> None:
        if not self._text.is_stopped:
            self._token_ids += output.token_ids
            self._sources += output.sources
            self._logprobs += output.logprobs or ()

    def _cut(
        self, delta: TextDelta, finish_reason: str | None = None, stop_reason: str | int | None = None
    ) -> ChoiceDelta:
        """The delta with the tokens it shows, which wait no longer."""
        n = len(delta.offsets)
        token_ids, self._token_ids = self._token_ids[:n], self._token_ids[n:]
        sources, self._sources = self._sources[:n], self._sources[n:]
        logprobs, self._logprobs = self._logprobs[:n], self._logprobs[n:]
        self.num_predicted += sources.count("prediction")
        return ChoiceDelta(
            index=self.index,
            text=delta.text,
            token_ids=token_ids,
            sources=sources,
            offsets=[self._offset + offset for offset in delta.offsets],
            logprobs=None if self._generation.sampling.logprobs is None else logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )

    def _why_finished(self, output: SequenceOutput) -> tuple[str | None, str | int | None]:
        if self._text.is_stopped:
            return "stop", self._text.stop_string
        if self._generation.is_scoring:
            return "length", None
        named = output.stop_token_id in self._generation.sampling.stop_token_ids
        return output.finish_reason, output.stop_token_id if named else None

    def _echo(self, output: SequenceOutput) -> ChoiceDelta:
        """The prompt, as the beginning of the choice."""
        prompt = self._generation.prompt_of(self.index)
        shows_all = self._generation.shows_special_tokens
        stream = TextStream(self._tokenizer.spelling if shows_all else self._tokenizer.token_bytes)
        parts = [stream.feed(prompt.token_ids), stream.finish()]
        text = "".join(part.text for part in parts) if prompt.text is None else prompt.text
        self._offset = len(text)
        return ChoiceDelta(
            index=self.index,
            text=text,
            token_ids=prompt.token_ids,
            sources=["prompt"] * len(prompt.token_ids),
            offsets=[offset for part in parts for offset in part.offsets],
            logprobs=self._prompt_rows(output, self._generation.sampling.logprobs),
        )

    def _prompt_rows(self, output: SequenceOutput, num_alternatives: int | None) -> list[TokenLogprob | None] | None:
        """Logprobs of the prompt's tokens, None for the first; None if they were not asked for."""
        if num_alternatives is None or output.prompt_logprobs is None:
            return None
        cut = [
            msgspec.structs.replace(
                row,
                top_token_ids=row.top_token_ids[:num_alternatives],
                top_logprobs=row.top_logprobs[:num_alternatives],
            )
            for row in output.prompt_logprobs
        ]
        return [None, *cut]
