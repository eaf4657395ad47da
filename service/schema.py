"""What clients may send: the fields of OpenAI's two generation requests that make sense here, and our own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from speculation.messages import BIAS, MAX_TOP_K, RANGES, Range, SpeculationConfig


def _within(allowed: Range) -> Meta:
    """The schema's form of a range."""
    if allowed.is_open:
        return Meta(gt=allowed.low, le=allowed.high)
    return Meta(ge=allowed.low, le=allowed.high)


MAX_INTEGER = 2**63 - 1
"""Largest integer that every part of the service can hold; what a field means bounds it further, where it is used."""
MAX_TEMPLATE_INTEGER = 2**53 - 1
"""Largest integer that every JSON client sends unchanged."""

Temperature = Annotated[float, _within(RANGES["temperature"])]
TopP = Annotated[float, _within(RANGES["top_p"])]
MinP = Annotated[float, _within(RANGES["min_p"])]
PresencePenalty = Annotated[float, _within(RANGES["presence_penalty"])]
FrequencyPenalty = Annotated[float, _within(RANGES["frequency_penalty"])]
RepetitionPenalty = Annotated[float, _within(RANGES["repetition_penalty"])]
Bias = Annotated[float, _within(BIAS)]
Seed = int
"""64 bits, signed or unsigned, which the interpreter checks: bounds here must fit in 63."""
TokenId = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
Count = Annotated[int, Meta(ge=1, le=MAX_INTEGER)]
CountOrZero = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
TemplateInteger = Annotated[int, Meta(ge=-MAX_TEMPLATE_INTEGER, le=MAX_TEMPLATE_INTEGER)]
TopK = Annotated[int, Meta(ge=-1, le=MAX_TOP_K)]
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
    top_k: TopK | None = None
    """0, -1 and whatever is above the vocabulary keep every token."""
    min_p: MinP | None = None
    presence_penalty: PresencePenalty | None = None
    frequency_penalty: FrequencyPenalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: dict[str, Bias] | None = None
    """By token id, as a decimal string."""
    seed: Seed | None = None
    """Without it the service draws one, and the response says which."""

    # When to stop.
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    min_tokens: CountOrZero | None = None
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
    top_logprobs: CountOrZero | None = None
    prediction: Prediction | None = None
    chat_template_kwargs: dict[str, str | bool | TemplateInteger | float | None] | None = None
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
    max_tokens: CountOrZero | None = None
    logprobs: CountOrZero | None = None
    echo: bool | None = None
    best_of: Count | None = None
    """Must equal `n`."""
    prediction: Prediction | None = None
    parse_special: bool | None = None
    """Whether control tokens spelled out in the prompt are control. Otherwise they are text."""


GenerationBody = ChatCompletionRequest | CompletionRequest

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
