"""A client that sends any bytes as a request, and says whether the answer is one that a service may give."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp

from benchmarks.fuzz_requests import Request

ANSWER_SECONDS = 60.0
"""Longest wait for an answer or the end of a connection."""
MAX_ERROR_BYTES = 4_096
"""Longest error answer: the values that are repeated in it are shortened."""
FRAMING_HEADERS = frozenset({"Content-Length", "Transfer-Encoding", "Connection", "Upgrade", "Expect", "Host"})
"""Headers that decide where a request ends or whether it is one at all: a connection may end without an answer."""


class Answer(NamedTuple):
    """What came back; status 0 if the connection ended before a status line."""

    status: int
    headers: dict[str, str]
    body: bytes


async def exchange(url: str, request: Request) -> Answer:
    """Send a request on a connection of its own and read the answer. Raises TimeoutError."""
    parts = urlsplit(url)
    async with asyncio.timeout(ANSWER_SECONDS):
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            with suppress(ConnectionError):  # it may be refused before all of it is sent
                writer.write(_encoded(request, parts.netloc))
                await writer.drain()
                if any(name in FRAMING_HEADERS for name, _ in request.headers):
                    writer.write_eof()
            return await _read(reader, has_body=request.method != "HEAD")
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


def _encoded(request: Request, host: str) -> bytes:
    given = {name.lower() for name, _ in request.headers}
    lines = [f"{request.method} {request.path or '/'} HTTP/1.1"]
    defaults = {"Host": host, "Connection": "close", "Content-Length": str(len(request.body))}
    lines += [f"{name}: {value}" for name, value in defaults.items() if name.lower() not in given]
    lines += [f"{name}: {value}" for name, value in request.headers]
    head = "\r\n".join(lines).encode("latin-1", "replace")
    return head + b"\r\n\r\n" + request.body


async def _read(reader: asyncio.StreamReader, *, has_body: bool) -> Answer:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        while head.startswith(b"HTTP/1.1 100"):
            head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return Answer(0, {}, b"")
    status_line, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    status = int(status_line.split()[1])
    body = b""
    if status != 101 and has_body:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            if "content-length" in headers:
                body = await reader.readexactly(int(headers["content-length"]))
            elif headers.get("transfer-encoding") == "chunked":
                while size := int(await reader.readline() or b"0", 16):
                    body += await reader.readexactly(size)
                    await reader.readline()
            else:
                body = await reader.read()
    return Answer(status, headers, body)


def fault_of(request: Request, answer: Answer) -> str | None:
    """What is wrong with an answer; None if a service may give it."""
    if answer.status == 0:
        if any(name in FRAMING_HEADERS for name, _ in request.headers):
            return None
        return "the connection ended without an answer"
    if answer.status >= 500 and answer.status != 503:
        return f"status {answer.status}: {answer.body[:300]!r}"
    if answer.status >= 400 and request.method != "HEAD":
        return _error_fault(answer)
    return None


def _error_fault(answer: Answer) -> str | None:
    if len(answer.body) > MAX_ERROR_BYTES:
        return f"status {answer.status} with {len(answer.body)} bytes, more than {MAX_ERROR_BYTES}"
    try:
        error = json.loads(answer.body)["error"]
        message, kind = error["message"], error["type"]
    except (ValueError, TypeError, KeyError):
        return f"status {answer.status} without an error object: {answer.body[:300]!r}"
    if not message or not kind:
        return f"status {answer.status} without a reason: {error}"
    return None


class FuzzedSocket:
    """A WebSocket that is sent extreme messages, and opened again where the service closes it."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = f"{url}/v1/stream"
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._num_probes = 0

    async def send(self, data: bytes) -> str | None:
        """Send one message, and behind it one that must be answered; what is wrong with the answers, if anything is."""
        if self._socket is None or self._socket.closed:
            self._socket = await self._session.ws_connect(self._url, max_msg_size=0)
        self._num_probes += 1
        probe_id = f"probe-{self._num_probes}"
        probe = {"type": "generate", "id": probe_id, "request": {"prompt": "One", "max_tokens": 1}}
        try:
            await self._socket.send_bytes(data)
            await self._socket.send_json(probe)
            async with asyncio.timeout(ANSWER_SECONDS):
                return await _until_probe_ends(self._socket, probe_id)
        except TimeoutError:
            await self.close()
            return f"no answer within {ANSWER_SECONDS:g} s"
        except (aiohttp.ClientError, ConnectionError) as error:
            await self.close()
            return f"the connection broke: {error!r}"

    async def close(self) -> None:
        if self._socket is not None:
            await self._socket.close()
            self._socket = None


async def _until_probe_ends(socket: aiohttp.ClientWebSocketResponse, probe_id: str) -> str | None:
    """Read until the probe and the fuzzed generation, if it started, have ended."""
    pending = {probe_id}
    while pending:
        message = await socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            return f"the socket was closed: {message.type.name} {message.data!r}"
        event: dict[str, Any] = json.loads(message.data)
        found = str(event["id"])
        if event["type"] == "started":
            pending.add(found)
        elif event["type"] in {"finished", "error"}:
            pending.discard(found)
        if event["type"] == "error":
            error = event["error"]
            if error["type"] == "server_error" or found == probe_id:
                return f"an error event: {error}"
            if len(message.data) > MAX_ERROR_BYTES:
                return f"an error event of {len(message.data)} characters, more than {MAX_ERROR_BYTES}"
    return None
