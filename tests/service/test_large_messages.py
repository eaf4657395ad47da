"""Large WebSocket messages: deadlines, budget and answers; and memory that has run out, on every route."""

from __future__ import annotations

import asyncio

import pytest

from service.body_budget import SMALL_BODY_BYTES
from service.connections import TRY_AGAIN_LATER
from service.front import Front
from service.settings import LimitSettings, ServerSettings
from tests.service.conftest import Service, StartService

TEXT = "/v1/completions"


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
    assert (service.front.bodies.held, service.front.large_requests.num_waiting) == (0, 0)


async def test_a_large_message_is_refused_by_its_id(service: Service) -> None:
    """The error of a large message names its id, or none where that could not be read; the socket goes on."""
    filler = "u" * 2 * SMALL_BODY_BYTES
    async with service.client.ws_connect(f"{service.url}/v1/stream") as socket:
        for message, message_id, param in (
            ({"type": "generate", "id": "a", "request": {"prompt": "hi", "user": filler, "n": 0}}, "a", "n"),
            ({"type": "generate", "id": "b", "request": {"user": filler}}, "b", "request"),
            ({"type": "cancel", "id": "c", "user": filler}, "c", "type"),
            ({"id": "d", "user": filler}, None, "type"),
        ):
            await socket.send_json(message)
            failed = await socket.receive_json()
            assert (failed["type"], failed["id"], failed["error"]["param"]) == ("error", message_id, param), failed
        await socket.send_json({"type": "generate", "id": "e", "request": {"prompt": "hi", "max_tokens": 1}})
        assert (await socket.receive_json())["type"] == "started"
