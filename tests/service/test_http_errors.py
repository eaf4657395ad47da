"""Errors beside the ordinary ones: malformed HTTP, mistakes of ours in the middle of an answer, clients that leave."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import AsyncMock, Mock

import aiohttp
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from service.answer import Answer
from service.choice import ChoiceDelta
from service.event_stream import EventStream
from service.logs import hide_keys
from tests.service.conftest import Service, StartService, parse_events

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
KEY = "sk-do-not-log-me"
LONG: dict[str, Any] = {"prompt": "hi", "cache_salt": "slow", "ignore_eos": True, "max_tokens": 200}
BROKEN: dict[str, Any] = {**LONG, "cache_salt": "broken"}
"""A request whose answer fails by a mistake of ours behind its first tokens, where `broken_answers` is used."""
HEAD = "GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"

MALFORMED = [
    f"{HEAD}Authorization: Bearer {KEY}\x01\r\n\r\n",
    f"{HEAD}Authorization: Bearer {KEY}\x00\r\n\r\n",
    f"{HEAD}Authorization : Bearer {KEY}\r\n\r\n",
    f"{HEAD}Authorization\r\n: Bearer {KEY}\r\n\r\n",
    f"{HEAD}Authorization: Bearer {KEY}{'x' * 9000}\r\n\r\n",
    f"{HEAD}Bearer {KEY}\r\n\r\n",
    f"{HEAD}Sec-WebSocket-Protocol: forerun.key.{KEY}\x02\r\n\r\n",
    f"{HEAD}Content-Length: Bearer {KEY}\r\n\r\n",
    f"{HEAD}Transfer-Encoding: Bearer {KEY}\r\n\r\n",
    f"{HEAD}Host: Bearer {KEY}\r\n\r\n",
    f"GET /{KEY} HTTP/9.9.9\r\nHost: localhost\r\n\r\n",
    f"GET http://[{KEY}/ HTTP/1.1\r\nHost: localhost\r\n\r\n",
    f"Bearer {KEY}\r\n\r\n",
    f"Bearer{KEY} / HTTP/1.1\r\n\r\n",
    "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "GET /v1/models HTTP/1.1\r\n\r\n",
]
"""Bytes that are no request."""


async def raw(service: Service, request: str | bytes) -> bytes:
    """Everything that comes back until the service closes the connection."""
    host, port = service.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request.encode("latin-1") if isinstance(request, str) else request)
    async with asyncio.timeout(30):
        answer = await reader.read()
    writer.close()
    return answer


def post(body: dict[str, Any]) -> bytes:
    """A request for a completion on a connection that ends with its answer."""
    data = json.dumps(body).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


@pytest.fixture
def broken_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of requests such as `BROKEN` raise behind their first tokens."""
    original = Answer.deltas

    async def deltas(self: Answer) -> AsyncIterator[list[ChoiceDelta]]:
        async for each in original(self):
            yield each
            if self.generation.cache_salt == "broken":
                raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(Answer, "deltas", deltas)


@pytest.mark.parametrize("request_bytes", MALFORMED)
async def test_malformed_http_is_answered_and_logged_in_a_line(
    service: Service, request_bytes: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer has the usual shape, the log one line at info, and neither repeats what was sent: it may be a key."""
    with capture_logs() as lines:
        answer = await raw(service, request_bytes)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split()[1] == b"400"
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "malformed_request")
    assert error["message"].startswith("the request is malformed: ")
    assert b"Server: forerun\r\n" in head + b"\r\n"
    assert b"X-Content-Type-Options: nosniff" in head
    (line,) = lines
    assert (line["event"], line["log_level"], line["status"]) == ("malformed request", "info", 400)
    assert caplog.records == []
    assert KEY not in answer.decode("latin-1") + str(lines)


async def test_malformed_http_behind_a_good_request(service: Service) -> None:
    """On a connection that served already the first answer is whole and the second is the error."""
    host, port = service.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (await reader.readuntil(b'{"status":"live"}')).startswith(b"HTTP/1.1 200")
    with capture_logs() as lines:
        writer.write(MALFORMED[0].encode("latin-1"))
        async with asyncio.timeout(30):
            assert b"malformed_request" in await reader.read()
    writer.close()
    assert [line["event"] for line in lines] == ["malformed request"]


async def test_every_answer_has_the_fixed_headers(service: Service) -> None:
    """What kind of answer it is, no browser guesses its type and nobody learns a version."""
    live = "/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    socket = "GET /v1/stream HTTP/1.1\r\nHost: localhost\r\nConnection: {}\r\nUpgrade: websocket\r\n"
    socket += "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n"
    asked: dict[str, tuple[int, str | bytes]] = {
        "probe": (200, f"GET {live}\r\n"),
        "HEAD": (200, f"HEAD {live}\r\n"),
        "unknown method": (405, f"PATCH {live}\r\n"),
        "unknown expectation": (417, f"GET {live}Expect: tea\r\n\r\n"),
        "foreign host": (403, "GET / HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n"),
        "stream": (200, post({"prompt": "hi", "max_tokens": 2, "stream": True})),
        "wrong body": (400, post({"prompt": 1.5})),
        "no upgrade": (400, "GET /v1/stream HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"),
        "bad handshake": (400, socket.format("close") + "\r\n"),
        # A frame of the client's that closes the socket.
        "handshake": (101, (socket.format("Upgrade") + "\r\n").encode() + b"\x88\x80\0\0\0\0"),
    }
    for path, status in (("/", 200), ("/page/main.js", 200), ("/metrics", 200), ("/none", 404), ("/v1/models", 200)):
        asked[path] = (status, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    for name, (status, request) in asked.items():
        head = (await raw(service, request)).partition(b"\r\n\r\n")[0].decode()
        assert int(head.split()[1]) == status, name
        fields = re.findall(r"(?im)^(server|x-content-type-options): (.*)\r?$", head + "\r")
        assert sorted((key.lower(), value.strip()) for key, value in fields) == [
            ("server", "forerun"),
            ("x-content-type-options", "nosniff"),
        ], name


async def test_an_engine_that_is_not_there_changes_no_header(start_service: StartService) -> None:
    """A 503 has the fixed headers, too."""
    service = await start_service(command=["sleep", "60"], wait=False)
    async with service.client.get(f"{service.url}/health/ready") as response:
        assert (response.status, response.headers["Server"]) == (503, "forerun")
        assert response.headers["X-Content-Type-Options"] == "nosniff"


async def test_an_expectation_that_is_unknown_is_told_in_the_usual_shape(service: Service) -> None:
    """Errors that arise before any handler runs are JSON as all others are."""
    answer = await raw(service, f"{HEAD}Connection: close\r\nExpect: tea\r\n\r\n")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"] == "Expectation Failed"


@pytest.mark.usefixtures("broken_answers")
@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_a_mistake_in_the_middle_of_a_stream_is_its_last_event(service: Service, path: str) -> None:
    """The stream ends with an error event and in good order; nothing else follows on the connection."""
    body = {**BROKEN, "stream": True}
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    request = post(body).replace(TEXT.encode(), path.encode(), 1)
    answer = await raw(service, request)
    assert answer.count(b"HTTP/1.") == 1
    assert answer.endswith(b"\r\n0\r\n\r\n")
    async with service.client.post(service.url + path, json=body) as response:
        events = parse_events(await response.text())
    assert events[-1]["error"]["type"] == "server_error"
    assert all("error" not in event for event in events[:-1])
    assert len(events) >= 2
    await service.until_idle()


@pytest.mark.usefixtures("broken_answers")
async def test_a_mistake_before_an_answer_is_a_500(service: Service) -> None:
    """Where nothing was sent yet the status tells."""
    status, answer = await service.post(TEXT, BROKEN)
    assert (status, answer["error"]["type"]) == (500, "server_error")
    await service.until_idle()


async def test_no_second_response_follows_the_first(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails once a response has begun, the connection is closed, and the request is counted as failed."""
    for error in (web.HTTPNotFound(), RuntimeError("a mistake of ours")):
        monkeypatch.setattr(EventStream, "end", AsyncMock(side_effect=error))
        answer = await raw(service, post({"prompt": "hi", "max_tokens": 2, "stream": True}))
        assert answer.count(b"HTTP/1.") == 1
        assert not answer.endswith(b"0\r\n\r\n")
    monkeypatch.undo()
    page = (await service.get("/metrics"))[1]
    assert 'forerun_requests_total{route="/v1/completions",status="500"} 2.0' in page
    assert "forerun_client_departures_total 0.0" in page
    assert (await service.post(TEXT, {"prompt": "hi"}))[0] == 200


async def test_a_client_that_leaves_while_it_is_written_to_is_counted(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A connection that closes under a chunk is a departure like any other: one line at info, no traceback."""
    original = EventStream.send

    async def send(self: EventStream, events: list[bytes]) -> None:
        if self.has_begun and self._request.transport is not None:
            self._request.transport.abort()
        await original(self, events)

    monkeypatch.setattr(EventStream, "send", send)
    with capture_logs() as lines:
        for _ in range(3):
            with pytest.raises((aiohttp.ClientError, ConnectionError)):
                await service.events(TEXT, LONG)
        await service.until_idle()
    outcomes = [(line["log_level"], line["status"]) for line in lines if line["event"] == "request"]
    assert outcomes == [("info", 499)] * 3
    assert all("exc_info" not in line and line["log_level"] in {"info", "debug"} for line in lines), lines
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    page = (await service.get("/metrics"))[1]
    assert 'forerun_requests_total{route="/v1/completions",status="499"} 3.0' in page
    assert "forerun_client_departures_total 3.0" in page


async def test_a_broken_connection_that_is_not_the_client_s_is_a_mistake_of_ours(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ConnectionError of something behind the service is a 500 with a traceback, and no departure."""
    monkeypatch.setattr(Answer, "deltas", Mock(side_effect=ConnectionRefusedError("by something else")))
    assert (await service.post(TEXT, {"prompt": "hi"}))[0] == 500
    assert "forerun_client_departures_total 0.0" in (await service.get("/metrics"))[1]


@pytest.mark.parametrize(
    "text",
    [
        f"Authorization: Bearer {KEY}",
        f"b'Authorization: bearer   {KEY}\\x01'",
        f"Authorization:\tBEARER\t{KEY}",
        f"protocols ['forerun', 'forerun.key.{KEY}']",
        f'Bearer "quoted"{KEY}" and more',
        f"Bearer schlüssel{KEY}\nTraceback",
    ],
)
def test_no_key_is_rendered_whatever_it_came_from(text: str) -> None:
    """In a line of the log, what stands behind "Bearer" or a key's subprotocol is hidden."""
    line = json.dumps({"event": "something", "exception": text, "level": "error"})
    hidden = hide_keys(None, "", line)
    assert KEY not in hidden
    assert "(hidden)" in hidden
    assert json.loads(hidden)["level"] == "error"
    assert hide_keys(None, "", '{"event": "the bearer"}') == '{"event": "the bearer"}'


def test_the_log_hides_keys_of_every_logger() -> None:
    """As the service sets its logs up, a library's line and the text of an exception pass the same filter."""
    code = (
        "import logging, structlog\n"
        "from service.logs import configure_logs\n"
        "configure_logs('info', 'json')\n"
        f"logging.getLogger('library').error('headers: %r', {{'Authorization': 'Bearer {KEY}'}})\n"
        f"logging.getLogger('aiohttp.websocket').warning('protocols %r', ['forerun.key.{KEY}'])\n"
        f"try: raise ValueError('Bearer {KEY}')\n"
        "except ValueError: structlog.get_logger('own').exception('failed')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [json.loads(line)["logger"] for line in done.stderr.splitlines()] == ["library", "own"]
    assert KEY not in done.stderr
    assert done.stderr.count("Bearer (hidden)") == 2
