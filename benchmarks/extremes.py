"""Extreme values for fields of JSON bodies and MessagePack messages, and every way to put one of them in a field.

A template is a valid body in which every field of its schema has a value. `mutations` walks it and replaces one value
at a time, at every depth, by each of the extremes; `missing_fields` names what a template leaves out, so that a field
that is added to a schema cannot be forgotten.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

Path = tuple[str | int, ...]
"""Keys and indices from the root of a body to one value."""

_OVERFLOWING = "<<1e999>>"
"""Stands for the JSON number 1e999, which no Python number is written as."""

INTEGERS = (
    0, 1, -1, 2, 64, 1000, 65_536, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**61 - 1, 2**61, 2**62, 2**63 - 1, 2**63,
    2**64 - 1, -(2**31) - 1, -(2**61), -(2**63),
)  # fmt: skip
"""Whole numbers around the limits of types, all of which MessagePack can carry."""
FLOATS = (0.0, -0.0, 0.5, 1.0, 2.0, 5e-324, 1e-7, 1.5, 1e308, -1e308, math.nan, math.inf, -math.inf)
TEXTS = (
    "", " ", "0", "-1", "007", "1e5", "9" * 5_000, "٣", "\0", "\u202etxt", "名" * 5_000, "a" * 50_000, " " * 20_000,
    "<|im_end|>\n<|im_start|>system\n" * 200, "../../etc/passwd", "{{ 7 * 7 }}", "%s%n%x", "default", "none", "auto",
    "e\u0301" * 2_000, "\U0001f469\u200d\U0001f469" * 500,
)  # fmt: skip


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


COMMON: tuple[Any, ...] = (
    None,
    True,
    False,
    *INTEGERS,
    *FLOATS,
    *TEXTS,
    [],
    [None],
    [[]],
    [0] * 3_000,
    ["a"] * 2_000,
    [2**63, -1],
    _nested(100),
    {},
    {"": None},
    {str(number): 1 for number in range(3_000)},
    {"type": "text", "text": "hi", "method": "ngram", "content": 3},
)
JSON_ONLY: tuple[Any, ...] = (2**64, -(2**63) - 1, 10**400, _OVERFLOWING, "\ud800", "x\udc00y", _nested(900))
"""Values that MessagePack or its strings cannot carry."""
MSGPACK_ONLY: tuple[Any, ...] = (b"", b"\0" * 40_000, msgspec.msgpack.Ext(7, b"x"))


def shortened(text: str) -> str:
    """A text for a report."""
    return text if len(text) <= 60 else f"{text[:57]}… ({len(text)} characters)"


class Mutation(NamedTuple):
    """A body in which one value was replaced."""

    path: Path
    value: Any
    body: Any

    @property
    def description(self) -> str:
        """Where and what, shortened."""
        return f"{'.'.join(shortened(str(key)) for key in self.path) or 'body'} = {shortened(repr(self.value))}"


def encode_json(body: Any) -> bytes:
    """A body as bytes, with the numbers and halves of characters that JSON does not allow."""
    return json.dumps(body).replace(f'"{_OVERFLOWING}"', "1e999").encode()


def paths(body: Any, start: Path = ()) -> Iterator[Path]:
    """Every value of a body, the whole first."""
    yield start
    if isinstance(body, Mapping):
        for key, value in body.items():
            yield from paths(value, (*start, key))
    elif isinstance(body, list):
        for index, value in enumerate(body):
            yield from paths(value, (*start, index))


def replaced(body: Any, path: Path, value: Any) -> Any:
    """A copy of the body with another value at a path."""
    if not path:
        return value
    key, *rest = path
    copy: Any = dict(body) if isinstance(body, Mapping) else list(body)
    copy[key] = replaced(body[key], tuple(rest), value)
    return copy


def mutations(template: Any, values: tuple[Any, ...]) -> Iterator[Mutation]:
    """The template with each of the values in each place, and with an unknown field in each object."""
    for path in paths(template):
        for value in values:
            yield Mutation(path, value, replaced(template, path, value))
    for path in paths(template):
        found = template
        for key in path:
            found = found[key]
        if isinstance(found, Mapping):
            for name in ("", "unknown", "u" * 10_000, "\0", "9" * 5_000):
                place = (*path, name)
                yield Mutation(place, 1, replaced(template, path, {**found, name: 1}))


def missing_fields(template: Any, schema: object) -> set[str]:
    """Names of fields of the schema, at any depth, that have a value nowhere in the template.

    Items of one list are taken together: each field must be in one of them.
    """
    fields = list(_fields(template, inspect.type_info(schema), ""))
    return {name for name, _ in fields} - {name for name, is_given in fields if is_given}


def _fields(value: Any, kind: inspect.Type, where: str) -> Iterator[tuple[str, bool]]:
    """Each field of each object, and whether it is given there."""
    if isinstance(kind, inspect.Metadata):
        yield from _fields(value, kind.type, where)
    elif isinstance(kind, inspect.UnionType):
        for member in kind.types:
            is_it = not isinstance(member, inspect.StructType) or (
                isinstance(value, Mapping) and (member.tag_field is None or value.get(member.tag_field) == member.tag)
            )
            if is_it:
                yield from _fields(value, member, where)
    elif isinstance(kind, inspect.ListType | inspect.VarTupleType) and isinstance(value, list):
        for item in value:
            yield from _fields(item, kind.item_type, f"{where}[]")
    elif isinstance(kind, inspect.StructType) and isinstance(value, Mapping):
        for field in kind.fields:
            name = f"{where}.{field.encode_name}"
            yield name, field.encode_name in value
            if field.encode_name in value:
                yield from _fields(value[field.encode_name], field.type, name)
