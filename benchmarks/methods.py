"""Speculation methods as `--methods` takes them: names, configs in JSON, and configs with a label."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec


class Method(NamedTuple):
    """A speculation config and what it is called in the table."""

    label: str
    speculation: dict[str, Any]


def read_methods(text: str) -> list[Method]:
    """The methods of a list such as `none,ngram,{"method": "ngram", "max_n": 4},deep={"method": "suffix"}`.

    Raises ValueError for JSON that is none, a config without a method, and a label that stands twice.
    """
    methods = [_read(item) for item in _split(text)]
    labels = [method.label for method in methods]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(f"method {label!r} stands twice; give one another label: label={{…}}")
    return methods


def _split(text: str) -> list[str]:
    """Between the commas that are in no braces."""
    items, depth, first = [], 0, 0
    for index, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == "," and depth == 0:
            items.append(text[first:index])
            first = index + 1
    return [item.strip() for item in [*items, text[first:]]]


def _read(item: str) -> Method:
    head, brace, tail = item.partition("{")
    if not brace:
        if not head:
            raise ValueError("a method is empty; write a name such as ngram, or JSON")
        return Method(head, {"method": head})
    try:
        config = msgspec.json.decode(brace + tail, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ValueError(f"method {item!r} is not valid JSON: {error}") from error
    if not isinstance(config.get("method"), str):
        raise ValueError(f'method {item!r} names no method; write {{"method": "ngram", …}}')
    settings = " ".join(f"{name}={value}" for name, value in config.items() if name != "method")
    return Method(head.strip().removesuffix("=") or f"{config['method']} {settings}".strip(), config)
