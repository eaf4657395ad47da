"""What a large JSON body consists of, counted without building any of it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from service.errors import ApiError
from service.settings import LimitSettings

OTHER_VALUES = 4096
"""Values allowed for everything whose number has no limit of its own, such as metadata."""
STRINGS_PER_MESSAGE = 16
"""Most strings of a message and of one part of its content: their fields' names, and the texts."""
CONTAINERS_PER_MESSAGE = 5
"""Most lists and objects of a message and of one part of its content."""
STRINGS_PER_PART = 4

_check_syntax = msgspec.json.Decoder(msgspec.Raw).decode


@dataclass(frozen=True, slots=True)
class OutlineBounds:
    """The most that a large body may consist of, so that decoding it takes milliseconds."""

    max_strings: int
    """Names of fields among them."""
    max_containers: int
    max_separators: int
    """Commas outside of strings: as many as there are values in lists and objects, nearly."""


OPERATOR_BOUNDS = OutlineBounds(OTHER_VALUES, OTHER_VALUES, 2 * OTHER_VALUES)
"""Bounds of what only operators send: profiles and experiments."""


def chat_bounds(context_length: int, limits: LimitSettings) -> OutlineBounds:
    """Bounds of a conversation: each message, and each part of one, takes at least a token of the context."""
    return _bounds(STRINGS_PER_MESSAGE * context_length, CONTAINERS_PER_MESSAGE * context_length, 0, limits)


def completion_bounds(context_length: int, limits: LimitSettings) -> OutlineBounds:
    """Bounds of prompts, each of a context's token ids at most, and of a prediction in parts."""
    strings, containers = STRINGS_PER_PART * context_length, context_length
    choices = limits.max_choices
    return _bounds(strings + choices, containers + choices, choices * context_length, limits)


def _bounds(strings: int, containers: int, numbers: int, limits: LimitSettings) -> OutlineBounds:
    other = OTHER_VALUES + limits.max_logit_bias + 2 * limits.max_stop_strings
    return OutlineBounds(strings + other, containers + other, numbers + strings + containers + other)


def check_outline(body: bytes, bounds: OutlineBounds) -> None:
    """Raises `ApiError` (400) for a body that is not valid JSON, or consists of more than it may.

    Decoding keeps the interpreter from all other threads until it has ended: 90 ms for 200,000 short lists. Each call
    here takes a few milliseconds at most for a megabyte.
    """
    try:
        _check_syntax(body)
    except RecursionError:
        raise ApiError.invalid(None, "the body is nested too deeply", code="invalid_json") from None
    except msgspec.DecodeError as error:
        message = f"the body is not valid JSON: {error}; NaN, infinities and lone surrogates are not JSON either"
        raise ApiError.invalid(None, message, code="invalid_json") from None
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_strings = body.count(b'"') // 2
    _check_count("strings and names of fields", num_strings, bounds.max_strings)
    outside = b"".join(body.split(b'"')[::2])
    _check_count("lists and objects", outside.count(b"[") + outside.count(b"{"), bounds.max_containers)
    _check_count("values", outside.count(b","), bounds.max_separators)


def _check_count(what: str, number: int, most: int) -> None:
    if number > most:
        message = f"the body has {number} {what}; a request within the model's context has at most {most}"
        raise ApiError.invalid(None, message, code="too_many_values")
