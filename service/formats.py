"""How an answer is written on the two OpenAI routes: whole, or as the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from service.answer import Closing
from service.choice import ChoiceDelta
from service.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    MessageDelta,
    TextChoice,
    Usage,
)
from service.served_model import ServedModel
from service.token_logprobs import chat_logprobs, completion_logprobs, prompt_logprobs


class AnswerFormat(Protocol):
    """One route's JSON. `closing` comes with the last chunk of a stream."""

    def whole(self, choices: Sequence[ChoiceDelta], closing: Closing) -> bytes:
        """The body of an answer that is not streamed; one delta a choice, all of it."""

    def chunk(self, delta: ChoiceDelta, closing: Closing | None, usage: Usage | None = None) -> bytes:
        """What is new of one choice; with `usage`, what the request has used so far."""

    def opening(self, num_choices: int) -> list[bytes]:
        """What can be said before the first token."""

    def usage_chunk(self, closing: Closing) -> bytes:
        """The chunk without choices that ends a stream whose client wants the usage."""


class ChatFormat:
    """/v1/chat/completions."""

    def __init__(self, generation_id: str, model: ServedModel, *, with_token_ids: bool, with_usage: bool) -> None:
        self._id = generation_id
        self._model = model
        self._created = int(time.time())
        self._with_token_ids = with_token_ids
        self._usage: UnsetType | None = None if with_usage else UNSET
        self._begun: set[int] = set()
        self._encode = msgspec.json.Encoder().encode

    def whole(self, choices: Sequence[ChoiceDelta], closing: Closing) -> bytes:
        return self._encode(
            ChatCompletion(
                id=self._id,
                created=self._created,
                model=self._model.name,
                system_fingerprint=self._model.ready.model_fingerprint,
                choices=[self._choice(choice) for choice in choices],
                usage=Usage.of(closing),
                seed=closing.seed,
                metrics=closing.metrics,
                prompt_logprobs=prompt_logprobs(choices[0], self._model.tokenizer),
            )
        )

    def chunk(self, delta: ChoiceDelta, closing: Closing | None, usage: Usage | None = None) -> bytes:
        is_first = delta.index not in self._begun
        self._begun.add(delta.index)
        message = MessageDelta(
            role="assistant" if is_first else UNSET, content=delta.text if delta.text or is_first else UNSET
        )
        choice = ChatChunkChoice(
            index=delta.index,
            delta=message,
            logprobs=chat_logprobs(delta, self._model.tokenizer),
            finish_reason=delta.finish_reason,
            stop_reason=UNSET if delta.stop_reason is None else delta.stop_reason,
            token_ids=delta.token_ids if self._with_token_ids else UNSET,
        )
        return self._chunk([choice], usage or self._usage, closing)

    def opening(self, num_choices: int) -> list[bytes]:
        """A chunk with the role for each choice."""
        self._begun.update(range(num_choices))
        message = MessageDelta(role="assistant", content="")
        choices = [
            ChatChunkChoice(index=index, delta=message, logprobs=None, finish_reason=None)
            for index in range(num_choices)
        ]
        return [self._chunk([choice], self._usage, None) for choice in choices]

    def usage_chunk(self, closing: Closing) -> bytes:
        return self._chunk([], Usage.of(closing), closing)

    def _choice(self, choice: ChoiceDelta) -> ChatChoice:
        return ChatChoice(
            index=choice.index,
            message=AssistantMessage(content=choice.text),
            logprobs=chat_logprobs(choice, self._model.tokenizer),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if self._with_token_ids else UNSET,
        )

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None, closing: Closing | None) -> bytes:
        return self._encode(
            ChatCompletionChunk(
                id=self._id,
                created=self._created,
                model=self._model.name,
                system_fingerprint=self._model.ready.model_fingerprint,
                choices=choices,
                usage=usage,
                seed=UNSET if closing is None else closing.seed,
                metrics=UNSET if closing is None else closing.metrics,
            )
        )


class CompletionFormat:
    """/v1/completions, where a chunk has the shape of the whole."""

    def __init__(self, generation_id: str, model: ServedModel, *, with_token_ids: bool, with_usage: bool) -> None:
        self._id = generation_id
        self._model = model
        self._created = int(time.time())
        self._with_token_ids = with_token_ids
        self._usage: UnsetType | None = None if with_usage else UNSET
        self._encode = msgspec.json.Encoder().encode

    def whole(self, choices: Sequence[ChoiceDelta], closing: Closing) -> bytes:
        return self._body([self._choice(choice) for choice in choices], Usage.of(closing), closing)

    def chunk(self, delta: ChoiceDelta, closing: Closing | None, usage: Usage | None = None) -> bytes:
        return self._body([self._choice(delta)], usage or self._usage, closing)

    def opening(self, num_choices: int) -> list[bytes]:
        """Nothing: a text has no role."""
        return []

    def usage_chunk(self, closing: Closing) -> bytes:
        return self._body([], Usage.of(closing), closing)

    def _choice(self, delta: ChoiceDelta) -> TextChoice:
        return TextChoice(
            index=delta.index,
            text=delta.text,
            logprobs=completion_logprobs(delta, self._model.tokenizer),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if self._with_token_ids else UNSET,
            prompt_logprobs=prompt_logprobs(delta, self._model.tokenizer),
        )

    def _body(self, choices: list[TextChoice], usage: Usage | UnsetType | None, closing: Closing | None) -> bytes:
        return self._encode(
            Completion(
                id=self._id,
                created=self._created,
                model=self._model.name,
                system_fingerprint=self._model.ready.model_fingerprint,
                choices=choices,
                usage=usage,
                seed=UNSET if closing is None else closing.seed,
                metrics=UNSET if closing is None else closing.metrics,
            )
        )
