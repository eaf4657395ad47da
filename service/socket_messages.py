"""Messages that clients send on GET /v1/stream, the WebSocket: JSON in text or binary frames."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from service.errors import ApiError
from service.foreign_fields import UnknownFields
from service.schema import ChatCompletionRequest, CompletionRequest, Received
from service.validation import parse_body, parse_generation

Id = Annotated[str, Meta(min_length=1, max_length=128)]
"""A generation's name, chosen by the client; unique among those that run on the socket."""


class Incoming(msgspec.Struct, frozen=True):
    """Fields that every message has; read first."""

    type: str
    id: Id | None = None


class Generate(msgspec.Struct, frozen=True, tag_field="type", tag="generate", forbid_unknown_fields=True):
    """Start of a generation. `request` is the body of either POST route, told apart by `messages` or `prompt`."""

    id: Id
    request: msgspec.Raw


class Cancel(msgspec.Struct, frozen=True, tag_field="type", tag="cancel", forbid_unknown_fields=True):
    """End of a generation: it finishes with the reason "abort". An unknown id is ignored."""

    id: Id


class RequestKind(msgspec.Struct, frozen=True):
    """Fields that tell the two kinds of request apart."""

    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()


def parse_generate(data: bytes, unknown_fields: UnknownFields) -> tuple[str, Received]:
    """Id and request of a `generate` message. Raises `ApiError` (400).

    Logprobs of the tokens themselves are always asked for.
    """
    message = parse_body(data, Generate)
    body = bytes(message.request)
    kind = parse_body(body, RequestKind)
    is_chat, is_text = (bytes(field) not in {b"", b"null"} for field in (kind.messages, kind.prompt))
    if is_chat == is_text:
        raise ApiError.invalid("request", "request must have either messages (chat) or prompt (text)")
    if is_chat:
        chat = parse_generation(body, ChatCompletionRequest, unknown_fields)
        request = msgspec.structs.replace(chat.request, logprobs=True)
        return message.id, msgspec.structs.replace(chat, request=request)
    completion = parse_generation(body, CompletionRequest, unknown_fields)
    if completion.request.logprobs is None:
        request = msgspec.structs.replace(completion.request, logprobs=0)
        completion = msgspec.structs.replace(completion, request=request)
    return message.id, completion
