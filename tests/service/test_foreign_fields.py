"""Fields of other servers: what cannot change the answer is ignored and named, what would is refused with a reason."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from service.errors import ApiError
from service.foreign_fields import MAX_UNKNOWN_FIELDS
from service.schema import ChatCompletionRequest, CompletionRequest
from service.settings import LimitSettings, ServerSettings
from service.validation import parse_generation
from tests.service.conftest import Service, StartService

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
HEADER = "X-Forerun-Ignored"

IGNORED: list[tuple[dict[str, Any], str]] = [
    ({"num_ctx": 4096}, "num_ctx"),
    ({"keep_alive": "5m"}, "keep_alive"),
    ({"cache_prompt": True}, "cache_prompt"),
    ({"provider": {"order": ["x"]}}, "provider"),
    ({"options": {"num_ctx": 4096}}, "num_ctx"),
    ({"something_new": [1, 2]}, "something_new"),
    ({"messages": [{"role": "user", "content": "hi", "id": "m1", "timestamp": 5}]}, "messages[].id, messages[].time"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "x"}}]}]},
        "messages[].content[].cache_control",
    ),
    ({"stream": True, "stream_options": {"include_usage": True, "other": 1}}, "stream_options.other"),
    ({"prediction": {"type": "content", "content": "hi", "other": 1}}, "prediction.other"),
    ({"größe\n": 1}, "gr%C3%B6%C3%9Fe%0A"),
]  # fmt: skip
NEUTRAL: list[dict[str, Any]] = [
    {"use_beam_search": False},
    {"length_penalty": 1},
    {"length_penalty": 1.0},
    {"best_of": 1},
    {"typical_p": 1.0},
    {"mirostat": 0},
    {"guided_json": None},
    {"structured_outputs": None},
    {"temprature": None},
    {"temperature": None, "top_p": None, "n": None, "stream": None, "stop": None, "seed": None},
    {"stream_options": None},
    {"stream_options": {"include_usage": None}},
    {"stream_options": {"include_usage": False}},
    {"tools": [], "tool_choice": "none"},
    {"logprobs": False, "top_logprobs": 0},
    {"top_logprobs": 0},
    {"echo": False, "suffix": ""},
    {"response_format": {"type": "text"}},
    {"max_tokens": 3, "max_completion_tokens": 3},
    {"metadata": {"a": [1]}},
]
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"temprature": 1}, "temprature", "'temperature'"),
    ({"topP": 0.5}, "topP", "'top_p'"),
    ({"maxTokens": 5}, "maxTokens", "'max_tokens'"),
    ({"max_new_tokens": 5}, "max_new_tokens", "use max_tokens"),
    ({"speculatoin": "none"}, "speculatoin", "'speculation'"),
    ({"speculation": {"method": "ngram", "num_ctx": 5}}, "speculation.num_ctx", "known are"),
    ({"messages": [{"role": "user", "content": "hi", "nam": "x"}]}, "messages[0].nam", "'name'"),
    ({"messages": [{"role": "user", "content": "hi", "images": ["aGk="]}]}, "messages[0].images", "only text"),
    ({"use_beam_search": True}, "use_beam_search", "beam search"),
    ({"length_penalty": 0.5}, "length_penalty", "beam search"),
    ({"typical_p": 0.5}, "typical_p", "sampling method"),
    ({"mirostat": 2}, "mirostat", "sampling method"),
    ({"guided_json": {"type": "object"}}, "guided_json", "constrained"),
    ({"options": {"mirostat": 2}}, "mirostat", "sampling method"),
    ({"prompt": "hi"}, "prompt", "/v1/completions"),
    ({"echo": True}, "echo", "/v1/completions"),
    ({"best_of": 3}, "best_of", "/v1/completions"),
    ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repeat_penalty", "same field"),
    ({"repeat_penalty": 100}, "repetition_penalty", "<= 10"),
    ({f"field{i}": 1 for i in range(MAX_UNKNOWN_FIELDS + 1)}, None, "more than 64 unknown fields"),  # type: ignore[list-item]
]


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": MESSAGES, "max_tokens": 4, **fields}).encode()


@pytest.mark.parametrize(("fields", "named"), IGNORED, ids=lambda value: str(value)[:40])
async def test_fields_that_change_nothing_are_ignored_and_named(
    service: Service, fields: dict[str, Any], named: str
) -> None:
    """The answer is that of the request without them; a header and one log line have their names."""
    with capture_logs() as logs:
        async with service.client.post(service.url + CHAT, data=chat(seed=0, **fields)) as response:
            assert response.status == 200, await response.text()
            assert named in response.headers[HEADER]
            assert response.headers[HEADER].isascii()
            text = await response.text()
    assert "user" in text
    assert len([entry for entry in logs if entry["event"] == "fields ignored"]) == 1


@pytest.mark.parametrize("fields", NEUTRAL, ids=str)
async def test_neutral_values_are_no_error_and_are_not_named(service: Service, fields: dict[str, Any]) -> None:
    """A field at the value that it has without being sent is as if it were not sent."""
    async with service.client.post(service.url + CHAT, data=chat(**fields)) as response:
        assert response.status == 200, await response.text()
        assert HEADER not in response.headers


@pytest.mark.parametrize(("fields", "param", "hint"), REFUSED, ids=lambda value: str(value)[:40])
def test_fields_that_would_change_the_answer_are_refused(fields: dict[str, Any], param: str, hint: str) -> None:
    """Misspelt fields, fields of the other route, and what is not supported are errors that name the field."""
    with pytest.raises(ApiError) as caught:
        parse_generation(chat(**fields), ChatCompletionRequest, "ignore")
    assert caught.value.status == 400
    assert caught.value.body.param == param
    assert hint in str(caught.value)


def test_unknown_fields_can_be_refused() -> None:
    """With `refuse` an unknown field is an error; neutral values and other names of served fields are none."""
    with pytest.raises(ApiError, match="num_ctx is not a known field"):
        parse_generation(chat(num_ctx=5), ChatCompletionRequest, "refuse")
    with pytest.raises(ApiError, match=r"messages\[0\].id is not a known field"):
        parse_generation(chat(messages=[{**MESSAGES[0], "id": 1}]), ChatCompletionRequest, "refuse")
    received = parse_generation(chat(use_beam_search=False, repeat_penalty=1.5), ChatCompletionRequest, "refuse")
    assert received.request.repetition_penalty == 1.5
    assert not received.ignored_fields


async def test_the_setting_holds_on_every_way_in(start_service: StartService) -> None:
    """`--unknown-fields refuse` holds on both routes, the WebSocket, and for large requests."""
    service = await start_service(
        server=ServerSettings(unknown_fields="refuse"), limits=LimitSettings(max_body_bytes=10**6)
    )
    for path, body in ((CHAT, {"messages": MESSAGES}), (TEXT, {"prompt": "hi"})):
        for padding in ({}, {"metadata": {"x": "y" * 100_000}}):
            status, answer = await service.post(path, {**body, **padding, "num_ctx": 5})
            assert (status, answer["error"]["param"]) == (400, "num_ctx")
    async with service.client.ws_connect(f"{service.url}/v1/stream") as socket:
        await socket.send_json({"type": "generate", "id": "a", "request": {"prompt": "hi", "num_ctx": 5}})
        assert json.loads(await socket.receive_str(timeout=30))["error"]["param"] == "num_ctx"


async def test_large_requests_and_sockets_name_what_they_ignore(start_service: StartService) -> None:
    """A request that is parsed in another process has the header too, and the WebSocket's `started` the names."""
    service = await start_service(limits=LimitSettings(max_body_bytes=10**6))
    padding = {"metadata": {"x": "y" * 100_000}}
    async with service.client.post(service.url + CHAT, data=chat(num_ctx=1, **padding)) as response:
        assert (response.status, response.headers[HEADER]) == (200, "num_ctx")
    async with service.client.ws_connect(f"{service.url}/v1/stream") as socket:
        for request in ({"prompt": "hi", "num_ctx": 5}, {"prompt": "hi", "num_ctx": 5, **padding}):
            await socket.send_json({"type": "generate", "id": "a", "request": request})
            started = json.loads(await socket.receive_str(timeout=30))
            assert (started["type"], started["ignored_fields"]) == ("started", ["num_ctx"])
            while json.loads(await socket.receive_str(timeout=30))["type"] != "finished":
                pass


@pytest.mark.parametrize(
    ("fields", "own"),
    [
        ({"repeat_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"n_predict": 7}, {"max_tokens": 7}),
        ({"options": {"temperature": 0.5, "num_predict": 7}}, {"temperature": 0.5, "max_tokens": 7}),
        ({"temperature": 1.5, "options": {"temperature": 0.5}}, {"temperature": 1.5}),
        ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}),
    ],
    ids=str,
)
def test_other_names_of_served_fields_are_understood(fields: dict[str, Any], own: dict[str, Any]) -> None:
    """Ollama's and llama.cpp's names set the fields that they mean."""
    body = json.dumps({"messages": MESSAGES, **fields}).encode()
    received = parse_generation(body, ChatCompletionRequest, "ignore")
    expected = msgspec.convert({"messages": MESSAGES, **own}, ChatCompletionRequest)
    assert received.request == expected
    assert not received.ignored_fields


def test_a_text_completion_takes_what_only_chat_knows_if_it_has_no_effect() -> None:
    """Fields of chat that mean nothing to a text completion are ignored; `logprobs: false` asks for none."""
    body = {"prompt": "hi", "reasoning_effort": "low", "logprobs": False, "messages": None}
    received = parse_generation(json.dumps(body).encode(), CompletionRequest, "ignore")
    assert received.ignored_fields == ("reasoning_effort",)
    assert isinstance(received.request, CompletionRequest)
    assert received.request.logprobs is None


async def test_a_flood_of_foreign_fields_does_not_slow_the_service(service: Service) -> None:
    """Requests with the most unknown fields, each with a long name, are answered while others are served."""
    fields = {f"{'x' * 1000}{i}": 1 for i in range(MAX_UNKNOWN_FIELDS)}
    answers = await asyncio.gather(*(service.post(CHAT, chat(**fields)) for _ in range(10)), service.post(CHAT, chat()))
    assert [status for status, _ in answers] == [200] * 11
