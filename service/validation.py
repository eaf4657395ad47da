"""Bytes to a checked struct, or to an error that names the field, its value and what is right."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from service.errors import ApiError, cut, did_you_mean
from service.foreign_fields import FieldCleaner, UnknownFields
from service.schema import ChatCompletionRequest, CompletionRequest, Received

RequestT = TypeVar("RequestT", bound=msgspec.Struct)

_LOCATED = re.compile(r"(?P<message>.*?)(?: - at `(?P<key>key` in `)?\$(?P<path>[^`]*)`)?", re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]|\[\.\.\.\]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
MAX_DIGITS = 4300
"""Most digits of an integer in a body: Python, and so the JSON decoder, converts no longer ones."""
_TYPES = {"float": "a number", "int": "an integer", "str": "a string", "bool": "true or false", "array": "an array"}


def parse_body(body: bytes, request_type: type[RequestT]) -> RequestT:
    """The body as a `request_type`. Raises `ApiError` (400) that says what to change."""
    try:
        return msgspec.json.decode(body, type=request_type)
    except (msgspec.DecodeError, RecursionError) as error:
        raise explain(str(error), _parse_object(body), request_type) from error


def parse_generation(
    body: bytes, request_type: type[ChatCompletionRequest | CompletionRequest], unknown_fields: UnknownFields
) -> Received:
    """The body of a request for generation, without fields of other servers that change nothing.

    Raises `ApiError` (400) that says what to change.
    """
    try:
        return Received(msgspec.json.decode(body, type=request_type))
    except (msgspec.DecodeError, RecursionError):
        cleaner = FieldCleaner(unknown_fields)
        tree = cleaner.clean(_parse_object(body), request_type)
    try:
        return Received(msgspec.convert(tree, request_type), tuple(cleaner.ignored))
    except msgspec.ValidationError as error:
        raise explain(str(error), tree, request_type) from error


def _parse_object(body: bytes) -> dict[str, Any]:
    tree = _parse_json(body)
    if not isinstance(tree, dict):
        raise ApiError.invalid(None, f"the body is {_shown(tree)}; it must be a JSON object", code="invalid_type")
    return tree


def _parse_json(body: bytes) -> object:
    try:
        return msgspec.json.decode(body)
    except RecursionError as error:
        raise ApiError.invalid(None, "the body is nested too deeply", code="invalid_json") from error
    except msgspec.DecodeError as error:
        for param, problem in _unspeakable(body):
            raise ApiError.invalid(param, f"{param} {problem}") from error
        raise ApiError.invalid(None, f"the body is not valid JSON: {error}", code="invalid_json") from error


def _unspeakable(body: bytes) -> Iterator[tuple[str, str]]:
    """Where a body holds what `msgspec` cannot decode: NaN, infinity, huge integers, halves of characters."""
    try:
        tree = json.loads(body, parse_int=_parse_integer)
    except (ValueError, RecursionError):
        return
    pending: list[tuple[str, object]] = [("", tree)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, dict):
            pending += [(f"{path}.{key}".removeprefix("."), item) for key, item in value.items()]
        elif isinstance(value, list):
            pending += [(f"{path}[{index}]", item) for index, item in enumerate(value)]
        elif isinstance(value, float) and not math.isfinite(value):
            yield path, f"is {value}: it must be a finite number"
        elif isinstance(value, _HugeInteger):
            yield path, f"is an integer of {value.num_digits} digits: no number here has more than {MAX_DIGITS}"
        elif isinstance(value, str) and _SURROGATE.search(value):
            yield path, "holds a lone surrogate, half a character: text must be valid Unicode"


class _HugeInteger(msgspec.Struct):
    """An integer that is too long to be converted."""

    num_digits: int


def _parse_integer(text: str) -> int | _HugeInteger:
    digits = text.lstrip("-")
    return int(text) if len(digits) <= MAX_DIGITS else _HugeInteger(len(digits))


def explain(error: str, tree: dict[str, Any], expected: type[msgspec.Struct]) -> ApiError:
    """What msgspec's message says is wrong with `tree`, in words that name the field, its value and what is right."""
    found = _LOCATED.fullmatch(error)
    message, path = (found["message"], found["path"] or "") if found else (error, "")
    value, kind = _follow(path, tree, inspect.type_info(expected))
    param = path.removeprefix(".").replace("[...]", "")
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", message, re.DOTALL):
        name = f"{param}.{cut(unknown[1])}".removeprefix(".")
        hint = did_you_mean(unknown[1], _field_names(kind))
        return ApiError.invalid(name, f"{name} is not a known field; {hint}", code="unknown_parameter")
    if missing := re.fullmatch(r"Object missing required field `(.*)`", message, re.DOTALL):
        name = f"{param}.{missing[1]}".removeprefix(".")
        _, kind = _follow(f"{path}.{missing[1]}", tree, inspect.type_info(expected))
        return ApiError.invalid(name, f"{name} is required{_choices(kind)}", code="missing_required_parameter")
    code = "invalid_type" if ", got `" in message else "invalid_value"
    text = f"{param} is {_shown(value)}: {_reworded(message)}{_choices(kind)}"
    return ApiError.invalid(param or None, text, code=code)


def _reworded(message: str) -> str:
    """The sentence of msgspec in the words of JSON."""

    def types(found: re.Match[str]) -> str:
        return " or ".join(_TYPES.get(name, f"an {name}") for name in found[1].split(" | ") if name != "null")

    message = re.sub(r", got `.*`$", "", message, flags=re.DOTALL)
    message = re.sub(r"^Invalid (enum )?value .*$", "it is not a known value", message, flags=re.DOTALL)
    return re.sub(r"^Expected", "it must be", re.sub(r"`([a-z |]+)`", types, message))


def _follow(path: str, value: Any, kind: inspect.Type) -> tuple[object, inspect.Type]:
    """The value at a path such as `.messages[0].role`, and the type it should have."""
    for name, index in _STEP.findall(path):
        structs = _structs(kind)
        kind = _without_null(kind, value)
        if name:
            value = value.get(name) if isinstance(value, Mapping) else None
            fields = kind.fields if isinstance(kind, inspect.StructType) else ()
            tags = inspect.LiteralType(tuple(str(struct.tag) for struct in structs if struct.tag_field == name))
            kind = next((field.type for field in fields if field.encode_name == name), tags)
        elif index:
            value = value[int(index)]
            kind = kind.item_type if isinstance(kind, inspect.ListType) else inspect.AnyType()
    return value, _without_null(kind, value)


def _without_null(kind: inspect.Type, value: object) -> inspect.Type:
    """Of a union, the member that the value means to be."""
    if isinstance(kind, inspect.Metadata):
        kind = kind.type
    if not isinstance(kind, inspect.UnionType):
        return kind
    members = [_without_null(member, value) for member in kind.types if not isinstance(member, inspect.NoneType)]
    if isinstance(value, Mapping):
        structs = _structs(kind)
        tagged = [struct for struct in structs if struct.tag_field and value.get(struct.tag_field) == struct.tag]
        members = [*tagged, *structs] or members
    elif isinstance(value, list):
        members = [member for member in members if isinstance(member, inspect.ListType)] or members
    return members[0]


def _structs(kind: inspect.Type) -> list[inspect.StructType]:
    """The structs a value of this type may be."""
    if isinstance(kind, inspect.Metadata):
        return _structs(kind.type)
    if isinstance(kind, inspect.UnionType):
        return [struct for member in kind.types for struct in _structs(member)]
    return [kind] if isinstance(kind, inspect.StructType) else []


def _field_names(kind: inspect.Type) -> list[str]:
    if not isinstance(kind, inspect.StructType):
        return []
    return [field.encode_name for field in kind.fields] + ([kind.tag_field] if kind.tag_field else [])


def _choices(kind: inspect.Type) -> str:
    """The values a field can have, where they can be listed."""
    if isinstance(kind, inspect.LiteralType) and kind.values:
        return f"; known are {', '.join(map(repr, kind.values))}"
    return ""


def _shown(value: object) -> str:
    """A value as the client wrote it, shortened."""
    return cut(msgspec.json.encode(value).decode())
