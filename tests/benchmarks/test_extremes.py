"""What the fuzzer sends covers every field and every route, so that what is added to either is covered too."""

from __future__ import annotations

import json
from typing import Any, get_args

import msgspec
import pytest

from benchmarks.extremes import COMMON, JSON_ONLY, encode_json, missing_fields, mutations, paths, replaced
from benchmarks.fuzz import routes
from benchmarks.fuzz_engine import ABORT, PREFER, SUBMIT, engine_messages
from benchmarks.fuzz_requests import (
    BODIES,
    CHAT,
    EXPERIMENT,
    PROFILE,
    PROMOTION,
    SPECULATION,
    TEXT,
    TOOL_CHAT,
    path_requests,
)
from service.experiments.handlers import ProfileBody, PromoteBody
from service.experiments.model import Definition
from service.schema import ChatCompletionRequest, CompletionRequest
from speculation.messages import Abort, Command, Drain, Prefer, SpeculationConfig, Submit


@pytest.mark.parametrize(
    ("templates", "schema"),
    [
        ([CHAT, TOOL_CHAT], ChatCompletionRequest),
        ([TEXT], CompletionRequest),
        ([PROFILE], ProfileBody),
        ([PROMOTION], PromoteBody),
        ([EXPERIMENT], Definition),
        ([SUBMIT], Submit),
        ([ABORT], Abort),
        ([PREFER], Prefer),
    ],
)
def test_templates_have_every_field_of_their_schema(templates: list[Any], schema: type[msgspec.Struct]) -> None:
    """A field that is added to a schema must be added to its templates, or this test names it; templates are valid."""
    assert missing_fields(templates, list[schema]) == set()  # type: ignore[valid-type]
    for template in templates:
        msgspec.convert(template, schema)


def test_every_speculation_method_has_a_template_with_every_field() -> None:
    """The configs that are put into bodies and messages are of all methods, and nothing of them is left out."""
    tags = {str(kind.__struct_config__.tag) for kind in get_args(SpeculationConfig)}
    assert {config["method"] for config in SPECULATION} == tags
    for config in SPECULATION:
        assert missing_fields(config, SpeculationConfig) == set()


def test_every_command_of_the_engine_has_a_template() -> None:
    """All that a front may say to an engine is sent with extreme values, but for the one that ends it."""
    assert {Submit, Abort, Prefer, Drain} == set(get_args(Command))


def test_every_route_is_asked() -> None:
    """Every route of the router is asked, and every route that reads a body has one to be mutated."""
    known = routes()
    assert {request.route for request in path_requests(known)} == {path for _, path in known}
    reading = {(method, path) for method, path in known if method in {"POST", "PUT"}}
    assert set(BODIES) == reading


def test_each_value_of_a_template_is_replaced_by_each_extreme_value() -> None:
    """A body with three values and one object gives each combination, and unknown names, and leaves the rest alone."""
    template = {"a": 1, "b": ["x"]}
    assert list(paths(template)) == [(), ("a",), ("b",), ("b", 0)]
    found = list(mutations(template, (None, 7)))
    assert [mutation.body for mutation in found[:8]] == [
        None, 7, {"a": None, "b": ["x"]}, {"a": 7, "b": ["x"]},
        {"a": 1, "b": None}, {"a": 1, "b": 7}, {"a": 1, "b": [None]}, {"a": 1, "b": [7]},
    ]  # fmt: skip
    assert {**template, "unknown": 1} in [mutation.body for mutation in found[8:]]
    assert template == {"a": 1, "b": ["x"]}


def test_numbers_that_python_does_not_write_are_sent() -> None:
    """1e999, NaN and halves of characters stand in the bytes as a client could send them."""
    values = (*COMMON, *JSON_ONLY)
    sent = b" ".join(encode_json(replaced({"a": 0}, ("a",), value)) for value in values)
    for text in (b"1e999", b"NaN", b"-Infinity", b"\\ud800", b"18446744073709551616"):
        assert text in sent
    assert json.loads(encode_json({"a": "\ud800"})) == {"a": "\ud800"}


def test_messages_reach_the_engine_as_valid_frames() -> None:
    """Most mutated messages are MessagePack, so that it is the fields that are tested and not the framing alone."""

    def is_packed(payload: bytes) -> bool:
        try:
            msgspec.msgpack.decode(payload)
        except (msgspec.DecodeError, ValueError):
            return False
        return True

    payloads = [payload for payload, _ in engine_messages()][::37]
    assert sum(map(is_packed, payloads)) > 0.9 * len(payloads)
