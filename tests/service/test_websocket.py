"""GET /v1/stream: many generations on one socket, on a scripted engine."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import aiohttp
import pytest

from service.answer import Answer
from service.choice import ChoiceDelta
from service.front import Front
from service.logs import hide_keys
from service.pool.settings import TenantSettings
from service.settings import LimitSettings, ServerSettings
from service.websocket import SOCKETS, Conversation
from tests.service.conftest import Service, StartService

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
LONG = {"prompt": "hi", "cache_salt": "slow", "ignore_eos": True, "max_tokens": 200}


class Talk:
    """A client of one socket."""

    def __init__(self, ends: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = ends

    async def generate(self, message_id: str, request: dict[str, Any]) -> None:
        await self.socket.send_json({"type": "generate", "id": message_id, "request": request})

    async def cancel(self, message_id: str) -> None:
        await self.socket.send_json({"type": "cancel", "id": message_id})

    async def next(self) -> dict[str, Any]:
        async with asyncio.timeout(20):
            return dict(json.loads(await self.socket.receive_str()))

    async def until_ended(self, *message_ids: str) -> dict[str, list[dict[str, Any]]]:
        """Everything that comes, by id, until each of the ids has finished or failed."""
        seen: dict[str, list[dict[str, Any]]] = {message_id: [] for message_id in message_ids}
        open_ids = set(message_ids)
        while open_ids:
            message = await self.next()
            seen[message["id"]].append(message)
            if message["type"] in {"finished", "error"}:
                open_ids.discard(message["id"])
        return seen


@asynccontextmanager
async def talk_to(service: Service) -> AsyncIterator[Talk]:
    async with service.client.ws_connect(f"{service.url}/v1/stream") as ends:
        yield Talk(ends)


def text_of(messages: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(m["text"] for m in messages if m["type"] == "tokens" and m["index"] == index)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": "The quick brown fox", "seed": 3, "stop": "ro", "max_tokens": 50}),
        (CHAT, {"messages": [{"role": "user", "content": "The quick brown fox"}], "seed": 3}),
    ],
)
async def test_the_socket_says_what_rest_says(service: Service, path: str, body: dict[str, Any]) -> None:
    """The same request has the same text, tokens, reason, usage and seed on both protocols."""
    _, rest = await service.post(path, {**body, "return_token_ids": True})
    async with talk_to(service) as talk:
        await talk.generate("a", body)
        messages = (await talk.until_ended("a"))["a"]
    choice = rest["choices"][0]
    assert [m["type"] for m in messages] == ["started", *["tokens"] * (len(messages) - 2), "finished"]
    assert messages[0] == {
        "type": "started",
        "id": "a",
        "model": rest["model"],
        "seed": 3,
        "prompt_tokens": rest["usage"]["prompt_tokens"],
        "speculation": {"method": "ngram", **messages[0]["speculation"]},
    }
    assert text_of(messages) == (choice["text"] if path == TEXT else choice["message"]["content"])
    tokens = [token for m in messages[1:-1] for token in m["tokens"]]
    assert [token["id"] for token in tokens] == choice["token_ids"]
    assert {token["logprob"] for token in tokens} == {-0.5}
    assert {token["source"] for token in tokens} <= {"ngram", "target"}
    offsets = [token["offset"] for token in tokens]
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    assert offsets[-1] < len(text_of(messages))
    finished = messages[-1]
    assert finished["usage"] == rest["usage"]
    assert finished["seed"] == 3
    assert finished["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert finished["metrics"]["timing"]["tokens"] == len(tokens)


async def test_alternatives_of_tokens_come_where_they_are_asked_for(service: Service) -> None:
    """Each token has the asked number of alternatives with id, text and logprob, in chat and text; else it has none."""
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    async with talk_to(service) as talk:
        for request, number in (
            ({**chat, "logprobs": True, "top_logprobs": 2}, 2),
            ({"prompt": "hello", "max_tokens": 3, "logprobs": 2}, 2),
            (chat, None),
        ):
            await talk.generate("a", request)
            messages = (await talk.until_ended("a"))["a"]
            tokens = [token for m in messages if m["type"] == "tokens" for token in m["tokens"]]
            assert len(tokens) == 3
            for token in tokens:
                rows = token.get("alternatives")
                assert (None if rows is None else len(rows)) == number
                if rows is not None:
                    assert rows[0][0] == token["id"]
                    assert (rows[0][2], rows[1][2]) == (-0.5, -9999.0)
                    assert all(isinstance(text, str) for _, text, _ in rows)


async def test_generations_share_a_socket(service: Service) -> None:
    """Many at a time, each with several choices, are kept apart by id and index and each is right."""
    prompts = {f"id {i}": f"{i} quick brown foxes jump" for i in range(12)}
    async with talk_to(service) as talk:
        for message_id, prompt in prompts.items():
            await talk.generate(message_id, {"prompt": prompt, "n": 2, "seed": 1, "max_tokens": 9})
        seen = await talk.until_ended(*prompts)
    for message_id, prompt in prompts.items():
        _, rest = await service.post(TEXT, {"prompt": prompt, "n": 2, "seed": 1, "max_tokens": 9})
        for choice in rest["choices"]:
            assert text_of(seen[message_id], choice["index"]) == choice["text"]
    await service.until_idle()


async def test_a_cancelled_generation_finishes_with_what_it_has(service: Service) -> None:
    """Cancelling ends one generation with the reason "abort" and leaves the others alone."""
    async with talk_to(service) as talk:
        await talk.generate("stays", {**LONG, "max_tokens": 60})
        await talk.generate("goes", LONG)
        while (await talk.next())["type"] != "tokens":
            pass
        await talk.cancel("goes")
        await talk.cancel("never was")
        seen = await talk.until_ended("stays", "goes")
    assert seen["goes"][-1]["choices"] == [{"index": 0, "finish_reason": "abort", "stop_reason": None}]
    assert seen["goes"][-1]["usage"]["completion_tokens"] < 200
    assert seen["stays"][-1]["usage"]["completion_tokens"] == 60
    await service.until_idle()


async def test_a_generation_can_be_cancelled_before_it_began(service: Service) -> None:
    """A cancel right behind its generate ends it too."""
    async with talk_to(service) as talk:
        await talk.generate("a", LONG)
        await talk.cancel("a")
        seen = await talk.until_ended("a")
    assert seen["a"][-1]["choices"][0]["finish_reason"] == "abort"


async def test_a_socket_that_closes_ends_what_it_asked_for(service: Service) -> None:
    """When the client closes, or its connection breaks, every generation of the socket is aborted."""
    for abrupt in (False, True):
        async with talk_to(service) as talk:
            for i in range(3):
                await talk.generate(f"{i}", LONG)
            await service.until(lambda: service.front.client.num_live == 3)
            if abrupt:
                transport = talk.socket.get_extra_info("socket")
                transport.shutdown(2)
        await service.until_idle()


async def test_messages_that_are_wrong_are_answered_and_the_socket_lives(service: Service) -> None:
    """Each mistake is an error with OpenAI's fields and, where it is known, the id; the next message is served."""
    wrong: list[tuple[str, str | None, str | None]] = [
        ("{", None, None),
        ("[]", None, None),
        ('{"id": "a"}', None, "type"),
        ('{"type": "shout", "id": "a"}', "a", "type"),
        ('{"type": "generate", "request": {"prompt": "hi"}}', None, "id"),
        ('{"type": "generate", "id": "a"}', "a", "request"),
        ('{"type": "generate", "id": "a", "request": {}}', "a", "request"),
        ('{"type": "generate", "id": "a", "request": {"prompt": "hi", "messages": []}}', "a", "request"),
        ('{"type": "generate", "id": "a", "request": {"prompt": "hi", "temperature": 9}}', "a", "temperature"),
        ('{"type": "generate", "id": "a", "request": {"prompt": "hi", "max_tokens": 999}}', "a", "max_tokens"),
        ('{"type": "generate", "id": "a", "request": {"prompt": "hi", "speculation": "x"}}', "a", "speculation"),
        ('{"type": "cancel"}', None, "id"),
    ]
    async with talk_to(service) as talk:
        for message, message_id, param in wrong:
            await talk.socket.send_str(message)
            answer = await talk.next()
            assert (answer["type"], answer["id"], answer["error"]["param"]) == ("error", message_id, param), message
        await talk.generate("a", {"prompt": "hi", "max_tokens": 2})
        assert (await talk.until_ended("a"))["a"][-1]["type"] == "finished"


async def test_an_id_is_used_once_at_a_time(start_service: StartService) -> None:
    """A second generation under a live id, and one beyond the socket's limit, are refused; the live ones go on."""
    service = await start_service(limits=LimitSettings(max_socket_requests=2))
    async with talk_to(service) as talk:
        await talk.generate("a", {**LONG, "max_tokens": 30})
        await talk.generate("a", LONG)
        await talk.generate("b", {**LONG, "max_tokens": 30})
        await talk.generate("c", LONG)
        codes = set()
        ended: set[str] = set()
        while len(ended) < 2:
            message = await talk.next()
            if message["type"] == "error":
                codes.add((message["id"], message["error"]["code"]))
            if message["type"] == "finished":
                ended.add(message["id"])
    assert codes == {("a", "invalid_value"), ("c", "overloaded")}
    assert ended == {"a", "b"}


async def test_an_id_is_free_with_its_last_message(service: Service) -> None:
    """A client may use an id again as soon as it has read `finished` or `error` of it, however often."""
    async with talk_to(service) as talking:
        for number in range(40):
            request = {"prompt": "hi", "max_tokens": 1} if number % 2 else {"prompt": ""}
            await talking.generate("same", request)
            messages = await talking.until_ended("same")
            assert messages["same"][-1]["type"] == ("finished" if number % 2 else "error")
            assert "in use" not in str(messages)


async def test_a_dead_engine_is_reported_on_the_socket(service: Service) -> None:
    """What kills engines gets an error in the end, its neighbour all of its tokens, and the same socket serves on."""
    async with talk_to(service) as talk:
        await talk.generate("b", {**LONG, "max_tokens": 100})
        while (await talk.next())["type"] != "tokens":
            pass
        killer = {"prompt": "hi there", "cache_salt": "die", "max_tokens": 50, "ignore_eos": True}
        await talk.generate("a", killer)
        seen = await talk.until_ended("a", "b")
        assert seen["a"][-1]["error"]["code"] == "engine_died"
        assert seen["b"][-1]["usage"]["completion_tokens"] == 100
        await service.until(lambda: service.front.is_ready)
        await talk.generate("c", {"prompt": "hi", "max_tokens": 2})
        assert (await talk.until_ended("c"))["c"][-1]["type"] == "finished"


@pytest.fixture
def broken_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests fail by a mistake of ours: with the salt "never" at once, with "broken" behind their first tokens."""
    original, generate = Answer.deltas, Front.generate

    async def deltas(self: Answer) -> AsyncIterator[list[ChoiceDelta]]:
        async for each in original(self):
            yield each
            if self.generation.cache_salt == "broken":
                raise RuntimeError("a mistake of ours")

    def begin(self: Front, generation_id: str, body: Any, origin: Any) -> Any:
        if body.request.cache_salt == "never":
            raise RuntimeError("a mistake of ours")
        return generate(self, generation_id, body, origin)

    monkeypatch.setattr(Answer, "deltas", deltas)
    monkeypatch.setattr(Front, "generate", begin)


@pytest.mark.usefixtures("broken_answers")
@pytest.mark.parametrize("salt", ["never", "broken"])
async def test_a_mistake_of_ours_ends_its_own_generation_alone(service: Service, salt: str) -> None:
    """It is an `error` for its id; the others of the socket go on to their end, and new ones begin."""
    async with talk_to(service) as talk:
        await talk.generate("good", {**LONG, "max_tokens": 60})
        while (await talk.next())["type"] != "tokens":
            pass
        await talk.generate("bad", {**LONG, "cache_salt": salt})
        seen = await talk.until_ended("good", "bad")
        assert seen["bad"][-1]["type"] == "error"
        assert seen["bad"][-1]["error"]["type"] == "server_error"
        assert "a mistake of ours" not in str(seen)
        assert seen["good"][-1]["usage"]["completion_tokens"] == 60
        await talk.generate("bad", {"prompt": "hi", "max_tokens": 2})
        assert (await talk.until_ended("bad"))["bad"][-1]["type"] == "finished"
    await service.until_idle()


async def test_a_mistake_while_a_message_is_read_is_an_error(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a message itself cannot be handled by a mistake of ours, its id is told and the socket lives."""
    async with talk_to(service) as talk:
        with monkeypatch.context() as patched:
            patched.setattr("service.websocket.parse_generate", Mock(side_effect=RecursionError("too deep")))
            await talk.generate("a", {"prompt": "hi"})
            answer = await talk.next()
        assert (answer["type"], answer["id"], answer["error"]["type"]) == ("error", "a", "server_error")
        await talk.generate("a", {"prompt": "hi", "max_tokens": 2})
        assert (await talk.until_ended("a"))["a"][-1]["type"] == "finished"


async def test_nothing_but_frames_follows_the_handshake(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a mistake outside every generation ends in a close frame that says so, and then the connection ends."""
    monkeypatch.setattr(Conversation, "run", AsyncMock(side_effect=RuntimeError("a mistake of ours")))
    host, port = service.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"GET /v1/stream HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n"
    )
    async with asyncio.timeout(20):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
        opcode, length = await reader.readexactly(2)
        status = int.from_bytes((await reader.readexactly(length))[:2])
        assert (opcode, status) == (0x88, aiohttp.WSCloseCode.INTERNAL_ERROR)
        # The client's own close frame, without which the service would wait for it.
        writer.write(b"\x88\x80\0\0\0\0")
        assert await reader.read() == b""
    writer.close()


async def test_a_key_among_unknown_subprotocols_is_not_logged(
    service: Service, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that offers its key alone, without the protocol's own name, is served, and its key stays unsaid."""
    monkeypatch.setattr(logging.getLogger("aiohttp.websocket"), "level", logging.NOTSET)
    encoded = base64.urlsafe_b64encode(b"sk-do-not-log-me").decode().rstrip("=")
    protocols = [f"forerun.key.{encoded}"]
    async with service.client.ws_connect(f"{service.url}/v1/stream", protocols=protocols) as ends:
        await Talk(ends).generate("a", {"prompt": "hi", "max_tokens": 2})
        assert (await Talk(ends).until_ended("a"))["a"][-1]["type"] == "finished"
    assert encoded not in hide_keys(None, "", json.dumps({"event": caplog.text}))


async def test_a_socket_that_does_not_read_is_dropped(start_service: StartService) -> None:
    """A client that stalls loses its socket, and nobody else notices."""
    service = await start_service(
        server=ServerSettings(stall_seconds=1.0), max_model_len=70_000, num_blocks=10_000, max_num_seqs=4
    )
    async with talk_to(service) as talk:
        talk.socket._reader._protocol.pause_reading()
        (ours,) = service.app[SOCKETS]
        for end, option in ((talk.socket, socket.SO_RCVBUF), (ours, socket.SO_SNDBUF)):
            end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, option, 4096)
        await talk.generate("a", {"prompt": "hi", "ignore_eos": True, "max_tokens": 60_000, "seed": 0})
        await service.until(lambda: service.front.client.num_live == 1)
        assert (await service.post(TEXT, {"prompt": "hi", "max_tokens": 5}))[0] == 200
        # The engine may have said everything long before anybody notices that nobody reads it.
        await service.until(lambda: service.front.metrics.stalls._value.get() == 1)
        await service.until_idle()
        talk.socket._reader._protocol.resume_reading()


async def test_a_socket_is_told_when_the_service_goes_away(service: Service) -> None:
    """At shutdown new generations are refused, and then the socket is closed with a code that says why."""
    async with talk_to(service) as talk:
        assert await service.front.admission.drain(1)
        await talk.generate("a", {"prompt": "hi"})
        assert (await talk.next())["error"]["code"] == "shutting_down"
        closing = asyncio.create_task(service.app.shutdown())
        message = await talk.socket.receive()
        await closing
        assert (message.type, message.data) == (aiohttp.WSMsgType.CLOSE, aiohttp.WSCloseCode.GOING_AWAY)


async def test_a_message_over_the_limit_closes_the_socket(start_service: StartService) -> None:
    """A message larger than a body may be ends the socket with the protocol's own code."""
    service = await start_service(limits=LimitSettings(max_body_bytes=1000))
    async with talk_to(service) as talk:
        await talk.generate("a", {"prompt": "x" * 2000})
        message = await talk.socket.receive()
        assert message.data == aiohttp.WSCloseCode.MESSAGE_TOO_BIG


async def test_pages_of_others_cannot_open_a_socket(service: Service) -> None:
    """A browser's handshake from another origin is refused; from the service's own, or without one, it is accepted."""
    for origin in ("http://evil.example", "null"):
        with pytest.raises(aiohttp.WSServerHandshakeError, match="403"):
            await service.client.ws_connect(f"{service.url}/v1/stream", headers={"Origin": origin})
    async with service.client.ws_connect(f"{service.url}/v1/stream", headers={"Origin": service.url}) as ends:
        assert not ends.closed


async def test_a_page_brings_its_key_as_a_subprotocol(start_service: StartService, tmp_path: Path) -> None:
    """Where keys are set, a socket opens for a key in its header or among its subprotocols, and for no other."""
    (tmp_path / "keys").write_text("somebody schlüssel/1\n")
    service = await start_service(tenants=TenantSettings(api_keys_file=str(tmp_path / "keys")))
    encoded = base64.urlsafe_b64encode("schlüssel/1".encode()).decode().rstrip("=")
    for protocols in ([], ["forerun"], ["forerun", "forerun.key.AAAA"], ["forerun", "forerun.key.%"]):
        with pytest.raises(aiohttp.WSServerHandshakeError, match="401"):
            await service.client.ws_connect(f"{service.url}/v1/stream", protocols=protocols)
    protocols = ["forerun", f"forerun.key.{encoded}"]
    async with service.client.ws_connect(f"{service.url}/v1/stream", protocols=protocols) as ends:
        assert ends.protocol == "forerun"
        await Talk(ends).generate("a", {"prompt": "hi", "max_tokens": 2})
        assert (await Talk(ends).until_ended("a"))["a"][-1]["type"] == "finished"
