"""What clients may send: the fields of OpenAI's two generation requests that make sense here, and our own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from speculation.messages import SpeculationConfig

Temperature = Annotated[float, Meta(ge=0.0, le=2.0)]
Probability = Annotated[float, Meta(ge=0.0, le=1.0)]
TopP = Annotated[float, Meta(gt=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
RepetitionPenalty = Annotated[float, Meta(gt=0.0, le=10.0)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
Seed = int
TokenId = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Salt = Annotated[str, Meta(max_length=256)]
Priority = Annotated[int, Meta(ge=-1000, le=1000)]


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text", forbid_unknown_fields=True):
    """One part of a message's content; text is the only kind this service reads."""

    text: str


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    # What an answer of this service or of OpenAI's carries beside its text, sent back by clients in the next turn.
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Meta(max_length=0)] | None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's `stream_options`."""

    include_usage: bool = False
    include_obfuscation: bool = False
    """Accepted and without effect."""


class Prediction(msgspec.Struct, frozen=True, tag_field="type", tag="content", forbid_unknown_fields=True):
    """OpenAI's predicted output: text the client expects to find in the answer."""

    content: str | list[TextPart]


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Plain text is the only format served."""

    type: Literal["text"]


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What chat and text completions have in common. `null` is the same as leaving a field out."""

    model: str | None = None
    """Without it, the model that is served."""

    # How tokens are chosen.
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    """0 and -1 keep every token."""
    min_p: Probability | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: dict[str, Bias] | None = None
    """By token id, as a decimal string."""
    seed: Seed | None = None
    """Without it the service draws one, and the response says which."""

    # When to stop.
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool | None = None

    # How it is answered.
    n: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """Each choice also carries `token_ids`."""

    # How it is served.
    speculation: SpeculationConfig | str | None = None
    """A config, or the name of a profile or a method."""
    cache_salt: Salt | None = None
    """Prefix blocks are shared among requests of the same salt alone."""
    priority: Priority | None = None
    """Lower is served earlier."""

    # OpenAI's, accepted and without effect.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class ChatCompletionRequest(GenerationRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    """OpenAI's newer name of `max_tokens`."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None
    prediction: Prediction | None = None
    chat_template_kwargs: dict[str, str | bool | int | float | None] | None = None
    """Variables for the model's chat template, such as `enable_thinking`."""
    response_format: ResponseFormat | None = None
    parallel_tool_calls: bool | None = None
    """Accepted and without effect."""
    modalities: list[Literal["text"]] | None = None
    verbosity: str | None = None
    """Accepted and without effect."""
    reasoning_effort: str | None = None
    """Accepted and without effect."""


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/completions."""

    prompt: str | list[Any]
    """A text, a list of texts, token ids, or a list of lists of token ids."""
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    logprobs: Annotated[int, Meta(ge=0)] | None = None
    echo: bool | None = None
    best_of: Count | None = None
    """Must equal `n`."""
    prediction: Prediction | None = None
    parse_special: bool | None = None
    """Whether control tokens spelled out in the prompt are control. Otherwise they are text."""


REFUSED = {
    "tools": "tool calls are not supported; leave the field out",
    "tool_choice": "tool calls are not supported; leave the field out",
    "functions": "function calls are not supported; leave the field out",
    "function_call": "function calls are not supported; leave the field out",
    "audio": "only text is generated; leave the field out",
    "web_search_options": "there is no web search; leave the field out",
    "suffix": "insertion before a suffix is not supported; leave the field out",
    "logit_processors": "custom logit processors are not supported; leave the field out",
}
"""Fields that OpenAI's clients know and that would change the answer: refused with a reason unless empty."""
