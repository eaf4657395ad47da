"""Large bodies are bounded by what they consist of before any of it is built, on every route and on the socket."""

from __future__ import annotations

import asyncio
import json

import pytest

from service.body_budget import SMALL_BODY_BYTES
from service.body_outline import OutlineBounds, chat_bounds, check_outline, completion_bounds
from service.connections import TRY_AGAIN_LATER
from service.errors import ApiError
from service.front import Front
from service.schema import ChatCompletionRequest, CompletionRequest
from service.settings import LimitSettings, ServerSettings
from service.validation import parse_body
from tests.service.conftest import Service, StartService

TEXT = "/v1/completions"
FEW = OutlineBounds(max_strings=3, max_containers=2, max_separators=1)
MANY_LISTS = json.dumps({"prompt": [[1]] * 60_000}, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("body", "counted"),
    [
        (b'["a","b","c","d"]', "4 strings"),
        (b'["\\\\","\\"","\\\\\\"","b"]', "4 strings"),
        (b"[[[1]]]", "3 lists and objects"),
        (b'{"a":{"b":{}}}', "3 lists and objects"),
        (b"[1,2,3]", "2 values"),
    ],
)
def test_what_is_too_many_is_counted_exactly(body: bytes, counted: str) -> None:
    """Strings, lists, objects and values over a bound are refused by their number, escapes notwithstanding."""
    with pytest.raises(ApiError, match=f"the body has {counted}") as caught:
        check_outline(body, FEW)
    assert caught.value.body.code == "too_many_values"


def test_what_is_inside_a_string_is_not_counted() -> None:
    """Brackets, commas and escaped quotes of a text are text."""
    check_outline(json.dumps({"prompt": '[[[{{{,,,"\\"\\\\"\\'}).encode(), FEW)


@pytest.mark.parametrize("body", [b"[1,", b'{"a":NaN}', b'"\\ud800"', b"[" * 9000, b'"' * 5])
def test_what_is_no_json_is_refused_unbuilt(body: bytes) -> None:
    """Broken syntax, NaN, half characters and deep nesting are refused by the syntax check."""
    with pytest.raises(ApiError) as caught:
        check_outline(body, FEW)
    assert caught.value.body.code == "invalid_json"


def test_the_largest_legitimate_requests_are_within_bounds() -> None:
    """Token ids for every choice, and a message of parts for every token of the context, pass."""
    context, limits = 512, LimitSettings()
    ids = json.dumps({"prompt": [[77] * (context - 1)] * limits.max_choices, "logit_bias": {"1": 1}}).encode()
    check_outline(ids, completion_bounds(context, limits))
    assert len(parse_body(ids, CompletionRequest).prompt) == limits.max_choices
    message: dict[str, object] = {"role": "assistant", "content": [{"type": "text", "text": "a"}], "name": "b"}
    message |= {"refusal": None, "audio": None, "function_call": None, "tool_calls": [], "annotations": []}
    chat = json.dumps({"messages": [message] * context}).encode()
    check_outline(chat, chat_bounds(context, limits))
    assert len(parse_body(chat, ChatCompletionRequest).messages) == context


@pytest.mark.parametrize("body", [MANY_LISTS, MANY_LISTS[:-1]], ids=["valid", "malformed"])
async def test_a_large_body_is_refused_before_it_is_built(
    service: Service, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body of very many lists, whole or cut off, gets 400 and is neither decoded nor explained from a tree."""
    monkeypatch.setattr("service.generation_routes.parse_body", _fail)
    monkeypatch.setattr("service.websocket.parse_body", _fail)
    code = "too_many_values" if body is MANY_LISTS else "invalid_json"
    assert len(body) > SMALL_BODY_BYTES
    status, answer = await service.post(TEXT, body)
    assert (status, answer["error"]["code"]) == (400, code)
    async with service.client.ws_connect(f"{service.url}/v1/stream") as socket:
        await socket.send_bytes(b'{"type":"generate","id":"a","request":' + body + b"}")
        failed = json.loads(await socket.receive_str())
        assert failed["error"]["code"] == code


def _fail(*_: object, **__: object) -> object:
    raise AssertionError("the body was decoded")


async def test_memory_that_has_run_out_is_503(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A MemoryError while a request is served is 503 with a reason, by REST, in a stream and on a socket."""

    def generate(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Front, "generate", generate)
    for body in ({"prompt": "hi"}, {"prompt": "hi", "stream": True}):
        status, answer = await service.post(TEXT, body)
        assert (status, answer["error"]["code"]) == (503, "out_of_memory")
    async with service.client.ws_connect(f"{service.url}/v1/stream") as socket:
        await socket.send_json({"type": "generate", "id": "a", "request": {"prompt": "hi"}})
        assert (await socket.receive_json())["error"]["code"] == "out_of_memory"


def half_a_message(num_bytes: int) -> bytes:
    """The beginning of a WebSocket's message that announces more than it brings."""
    return b"\x82\xff" + (2 * num_bytes).to_bytes(8, "big") + bytes(4) + bytes(num_bytes)


async def open_socket(service: Service) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A WebSocket whose frames the test writes itself."""
    port = int(service.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"GET /v1/stream HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    writer.write(f"{head}Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {'A' * 22}==\r\n\r\n".encode())
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
    return reader, writer


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    """What comes until the service closes the socket; nothing where bytes that it had not read made that a reset."""
    async with asyncio.timeout(20):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


async def test_half_a_large_message_is_not_waited_for(start_service: StartService) -> None:
    """A WebSocket whose large message does not go on is closed at the deadline of bodies; a silent one stays."""
    service = await start_service(server=ServerSettings(body_seconds=1.0))
    silent, half = await open_socket(service), await open_socket(service)
    half[1].write(half_a_message(2 * SMALL_BODY_BYTES))
    assert await until_closed(half[0]) == TRY_AGAIN_LATER
    assert not silent[0].at_eof()
    for _, writer in (silent, half):
        writer.close()


async def test_large_messages_share_a_budget(start_service: StartService) -> None:
    """When arriving messages are more than may be held, the one that began first is closed."""
    service = await start_service(limits=LimitSettings(max_pending_bytes=5 * SMALL_BODY_BYTES))
    first, second = await open_socket(service), await open_socket(service)
    for _, writer in (first, second):
        writer.write(half_a_message(3 * SMALL_BODY_BYTES))
        await asyncio.sleep(0.1)
    assert await until_closed(first[0]) in {TRY_AGAIN_LATER, b""}
    assert not second[0].at_eof()
    for _, writer in (first, second):
        writer.close()


async def test_a_large_message_is_served(service: Service) -> None:
    """A large message that came whole is answered like a small one, and nothing of it stays in the budget."""
    async with service.client.ws_connect(f"{service.url}/v1/stream") as socket:
        request = {"prompt": "hi", "max_tokens": 1, "user": "u" * 2 * SMALL_BODY_BYTES}
        for message_id in ("a", "b"):
            await socket.send_json({"type": "generate", "id": message_id, "request": request})
            while (message := await socket.receive_json())["type"] != "finished":
                assert (message["id"], message["type"] != "error") == (message_id, True), message
    assert (service.front.bodies.held, service.front.long_texts.pending) == (0, 0)
