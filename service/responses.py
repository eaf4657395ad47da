"""What the generation routes send: OpenAI's objects, with our additions at the root."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from service.answer import Answer, Closing
from service.request_metrics import Metrics
from speculation.messages import SamplingDefaults


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Part of `usage`."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """Part of `usage`: what the client's predicted output had right, and what it had wrong."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What a request used."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    """Known at the end, as is what the prefix cache held."""

    @classmethod
    def until_now(cls, answer: Answer) -> Usage:
        """What a request that is still answered has used."""
        prompt, completion = answer.num_prompt_tokens, answer.num_completion_tokens
        return cls(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)

    @classmethod
    def of(cls, closing: Closing) -> Usage:
        return cls(
            prompt_tokens=closing.num_prompt_tokens,
            completion_tokens=closing.num_completion_tokens,
            total_tokens=closing.num_prompt_tokens + closing.num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(closing.num_cached_tokens),
            completion_tokens_details=CompletionTokensDetails(
                closing.num_predicted_tokens, closing.num_mispredicted_tokens
            ),
        )


class TopLogprob(msgspec.Struct, frozen=True):
    """One of the most likely tokens at a place."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    """A token of a chat answer, and what else was likely."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """The logprobs of a chat choice."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """The logprobs of a text choice; four aligned lists."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A chat answer."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class MessageDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What a chunk adds to a chat answer."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class PromptLogprob(msgspec.Struct, frozen=True):
    """One entry of vLLM's `prompt_logprobs`: a token of the prompt, or one of the most likely in its place."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""An entry for each token of the prompt, by token id; None for the first."""


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a chat completion."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What a chunk adds to one answer."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class TextChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a text completion, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a chat completion that is not streamed."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    seed: int
    metrics: Metrics
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a chat completion that is streamed."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    seed: int | UnsetType = UNSET
    metrics: Metrics | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a text completion, or one event of it."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET
    seed: int | UnsetType = UNSET
    metrics: Metrics | UnsetType = UNSET


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of /v1/models."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["forerun"] = "forerun"
    max_model_len: int
    description: str
    sampling_defaults: SamplingDefaults
    """What requests get that set nothing else, and where it comes from."""


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /v1/models."""

    object: Literal["list"] = "list"
    data: list[Model]
