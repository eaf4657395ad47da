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
TopP = Annotated[float, Meta(ge=0.0, le=RANGES["top_p"].high)]
"""0 keeps the most likely token alone, as it does for OpenAI."""
MinP = Annotated[float, _within(RANGES["min_p"])]
PresencePenalty = Annotated[float, _within(RANGES["presence_penalty"])]
FrequencyPenalty = Annotated[float, _within(RANGES["frequency_penalty"])]
RepetitionPenalty = Annotated[float, _within(RANGES["repetition_penalty"])]
Bias = Annotated[float, _within(BIAS)]
Seed = int
"""64 bits, signed or unsigned, which the interpreter checks: bounds here must fit in 63."""
TokenId = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
Count = Annotated[int, Meta(ge=1, le=MAX_INTEGER)]
MaxTokens = Annotated[int, Meta(ge=-1, le=MAX_INTEGER)]
"""-1 is as many as the context has room for."""
TruncatedLength = Annotated[int, Meta(ge=-1, le=MAX_INTEGER)]
"""Number of prompt tokens that are kept; -1 keeps what the context has room for."""
CountOrZero = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
TemplateInteger = Annotated[int, Meta(ge=-MAX_TEMPLATE_INTEGER, le=MAX_TEMPLATE_INTEGER)]
TopK = Annotated[int, Meta(ge=-1, le=MAX_TOP_K)]
Salt = Annotated[str, Meta(max_length=256)]
Priority = Annotated[int, Meta(ge=-1000, le=1000)]


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text", forbid_unknown_fields=True):
    """One part of a message's content; text is the only kind this service reads."""

    text: str


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Name and arguments of a function that an assistant has called."""

    name: str
    arguments: str | dict[str, Any] = ""
    """A JSON object, as text or as it is."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tool call of an assistant's turn in the history."""

    id: str | None = None
    type: Literal["function"] = "function"
    index: CountOrZero | None = None
    """Sent by clients that keep the chunks of a stream; without effect."""
    function: FunctionCall


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    """Only an assistant's may be null or missing."""
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    """Of an assistant's turn."""
    tool_call_id: str | None = None
    """Of a tool's result: the call that it answers."""
    reasoning_content: str | None = None
    """Of an assistant's turn; a variable of the chat template."""

    # Parts of an answer of this service's or of OpenAI's that clients send back in the next turn, without effect.
    refusal: str | None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's `stream_options`."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """vLLM's: every chunk has the usage up to it."""
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
    include_stop_str_in_output: bool | None = None
    """Whether the stop string, or the token of `stop_token_ids`, that ends the answer is part of its text."""

    # How long the prompt may be.
    truncate: bool | None = None
    """Whether `max_tokens` is reduced to the room that the context has; otherwise more is an error."""
    truncate_prompt_tokens: TruncatedLength | None = None
    """vLLM's: keep the last tokens of the prompt, at most this many."""

    # How it is answered.
    n: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """Each choice also carries `token_ids`."""
    skip_special_tokens: bool | None = None
    """Whether control tokens are left out of the text; true is the default."""
    prompt_logprobs: CountOrZero | None = None
    """vLLM's: the logprobs of the prompt's tokens, with this many alternatives each."""
    request_id: Annotated[str, Meta(max_length=128)] | None = None
    """vLLM's: the end of the response's `id`."""

    # How it is served.
    speculation: SpeculationConfig | str | None = None
    """A config, or the name of a profile or a method."""
    cache_salt: Salt | None = None
    """Prefix blocks are shared among requests of the same salt alone."""
    priority: Priority | None = None
    """Lower is served earlier."""

    # OpenAI's, accepted and without effect.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class ChatCompletionRequest(GenerationRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    add_generation_prompt: bool | None = None
    """Whether the chat template opens an assistant's turn at the end; the default is true."""
    continue_final_message: bool | None = None
    """Whether the answer continues the last message, whose turn stays open."""
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
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
    max_tokens: MaxTokens | None = None
    """0 with `echo` scores the prompt. Without it 16, or what the context has room for where that is less."""
    logprobs: CountOrZero | None = None
    echo: bool | None = None
    best_of: Count | None = None
    """Must equal `n`."""
    prediction: Prediction | None = None
    parse_special: bool | None = None
    """Whether control tokens spelled out in the prompt are control. Otherwise they are text."""


GenerationBody = ChatCompletionRequest | CompletionRequest


class Received(msgspec.Struct, frozen=True):
    """A request for generation as it came in."""

    request: GenerationBody
    ignored_fields: tuple[str, ...] = ()
    """Paths of the fields of other servers that were left out."""
