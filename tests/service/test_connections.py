"""Connections that do not speak, too many of them, and bodies that do not arrive."""

from __future__ import annotations

import asyncio
import errno
import json
import resource
import socket
from typing import Any

import aiohttp
import pytest

from service import file_limit
from service.acceptor import Acceptor, handle_loop_errors
from service.connections import ConnectionTable, LogThrottle
from service.file_limit import connection_limit
from service.settings import LimitSettings, ServerSettings
from tests.service.conftest import Service, StartService

TEXT = "/v1/completions"
LIVE = b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
QUICK = ServerSettings(header_seconds=0.5, idle_seconds=0.5, body_seconds=1.0, stall_seconds=1.0)
PATIENCE_SECONDS = 20.0
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(service: Service, data: bytes = b"") -> Stream:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(service.url.rpartition(":")[2]))
    writer.write(data)
    return reader, writer


async def rest_of(stream: Stream) -> bytes:
    """Everything until the service closes the connection."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        try:
            return await stream[0].read()
        except ConnectionResetError:
            return b""
        finally:
            stream[1].close()


def error_of(response: bytes) -> tuple[int, dict[str, Any]]:
    """Status and error object of a response as it came."""
    head, _, body = response.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


async def test_a_connection_that_says_nothing_is_closed(start_service: StartService) -> None:
    """No byte, half a head, or no second request: each ends within its deadline, and half a head gets a 408."""
    service = await start_service(server=QUICK)
    silent, half, idle = [await connect(service, data) for data in (b"", LIVE[:20], LIVE)]
    assert await rest_of(silent) == b""
    status, error = error_of(await rest_of(half))
    assert (status, error["code"]) == (408, "request_timeout")
    assert (await rest_of(idle)).startswith(b"HTTP/1.1 200")


async def test_a_head_that_drips_in_is_not_waited_for(start_service: StartService) -> None:
    """A byte now and then does not move the deadline of a request's head."""
    service = await start_service(server=QUICK)
    reader, writer = await connect(service, b"GET /health/live HTTP/1.1\r\nX-Slow: ")

    async def drip() -> None:
        while True:
            writer.write(b"a")
            await asyncio.sleep(0.1)

    dripping = asyncio.create_task(drip())
    try:
        assert error_of(await rest_of((reader, writer)))[0] == 408
    finally:
        dripping.cancel()


@pytest.mark.parametrize("pause", [0.1, None])
async def test_a_body_has_a_deadline(start_service: StartService, pause: float | None) -> None:
    """A body that drips in, or stops, is answered 408 with the reason, and its connection is closed."""
    service = await start_service(server=QUICK)
    head = f"POST {TEXT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100000\r\n\r\n".encode()
    reader, writer = await connect(service, head + b'{"prompt": "')

    async def drip() -> None:
        while pause is not None:
            writer.write(b"a")
            await asyncio.sleep(pause)

    dripping = asyncio.create_task(drip())
    try:
        status, error = error_of(await rest_of((reader, writer)))
    finally:
        dripping.cancel()
    assert (status, error["code"]) == (408, "request_timeout")
    assert "bytes of the body arrived" in error["message"]
    assert service.front.bodies.held == 0


async def test_a_long_answer_outlives_every_deadline(start_service: StartService) -> None:
    """A request that is being served is neither idle nor silent, however long it takes."""
    service = await start_service(server=QUICK)
    body = {"prompt": "hi", "cache_salt": "slow", "ignore_eos": True, "max_tokens": 150}
    status, answer = await service.post(TEXT, body)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 150)


async def test_silent_connections_make_room_for_new_ones(start_service: StartService) -> None:
    """With every connection of the limit taken by silent, idle or quiet ones, a new request is served at once."""
    service = await start_service(server=ServerSettings(max_connections=8))
    port = int(service.url.rpartition(":")[2])
    silent = [await connect(service, LIVE if index % 2 else b"") for index in range(30)]
    sockets = [await service.client.ws_connect(f"{service.url}/v1/stream") for _ in range(8)]
    async with aiohttp.ClientSession() as fresh:
        async with fresh.post(f"http://127.0.0.1:{port}{TEXT}", json={"prompt": "hi"}) as response:
            assert response.status == 200
        async with fresh.get(f"http://127.0.0.1:{port}/metrics") as response:
            metrics = await response.text()
    assert 'forerun_connections_ended_total{reason="evicted"}' in metrics
    assert "forerun_connections_limit 8.0" in metrics
    received = [asyncio.create_task(each.receive()) for each in sockets]
    done, _ = await asyncio.wait(received, timeout=1.0)
    assert {task.result().data for task in done} == {1013}
    for task in received:
        task.cancel()
    for stream in silent:
        stream[1].close()
    for each in sockets:
        await each.close()


async def test_beyond_the_limit_a_connection_is_refused_with_the_reason(start_service: StartService) -> None:
    """When every connection is busy, a new one gets 503 in the usual shape, and those before it go on."""
    service = await start_service(server=ServerSettings(max_connections=3))
    body = {"prompt": "hi", "cache_salt": "slow", "ignore_eos": True, "max_tokens": 100}
    busy = [asyncio.create_task(service.post(TEXT, body)) for _ in range(3)]
    await service.until(lambda: service.front.client.num_live == 3)
    response = await rest_of(await connect(service))
    assert b"Connection: close" in response
    assert b"Retry-After: 1" in response
    status, error = error_of(response)
    assert (status, error["code"]) == (503, "too_many_connections")
    assert [status for status, _ in await asyncio.gather(*busy)] == [200] * 3
    assert (await service.post(TEXT, {"prompt": "hi"}))[0] == 200


async def test_a_body_that_holds_others_up_is_given_up(
    start_service: StartService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow body that fills the budget is ended when another one waits for its room, which is then served."""
    monkeypatch.setattr("service.body_budget.GRACE_SECONDS", 0.2)
    limits = LimitSettings(max_body_bytes=300_000, max_pending_bytes=300_000)
    service = await start_service(limits=limits)
    head = f"POST {TEXT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 299999\r\n\r\n".encode()
    slow = await connect(service, head + b"x" * 1000)
    await service.until(lambda: service.front.bodies.held > 0)
    status, _ = await service.post(TEXT, {"prompt": "hi", "user": "x" * 250_000})
    assert status == 200
    status, error = error_of(await rest_of(slow))
    assert (status, error["code"]) == (503, "too_many_bodies")
    assert service.front.bodies.held == 0


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_body_that_does_not_decompress_is_a_client_s_error(service: Service, encoding: str) -> None:
    """A body that is not what Content-Encoding says is 400."""
    headers = {"Content-Encoding": encoding}
    status, body = await service.post(TEXT, b'{"prompt": "hi"}', headers=headers)
    assert (status, body["error"]["code"]) == (400, "invalid_body")


async def test_a_client_that_reads_no_whole_answer_is_dropped(start_service: StartService) -> None:
    """Requests whose answers nobody takes do not keep their connection."""
    service = await start_service(server=ServerSettings(stall_seconds=0.5))
    port = int(service.url.rpartition(":")[2])
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", port))
    ask = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 20
    with client:
        async with asyncio.timeout(PATIENCE_SECONDS):
            try:
                while True:
                    await loop.sock_sendall(client, ask)
                    await asyncio.sleep(0.01)
            except (ConnectionResetError, BrokenPipeError):
                pass


async def test_a_web_socket_whose_client_is_gone_ends(
    start_service: StartService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A WebSocket that answers no ping is closed; one that does stays."""
    monkeypatch.setattr("service.websocket.PING_SECONDS", 0.4)
    service = await start_service(server=QUICK)
    upgrade = (
        b"GET /v1/stream HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    alive = await service.client.ws_connect(f"{service.url}/v1/stream")
    reading = asyncio.create_task(alive.receive())
    assert (await rest_of(await connect(service, upgrade))).startswith(b"HTTP/1.1 101")
    assert not reading.done()
    await alive.close()
    await reading


async def test_no_file_left_is_one_line_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    """A listening socket without files pauses, says so once, and goes on accepting afterwards."""
    loop = asyncio.get_running_loop()
    listener = socket.create_server(("127.0.0.1", 0))
    attempts = 0

    class Exhausted:
        def accept(self) -> tuple[socket.socket, Any]:
            nonlocal attempts
            attempts += 1
            raise OSError(errno.EMFILE, "Too many open files")

        def fileno(self) -> int:
            return listener.fileno()

    table = ConnectionTable(ServerSettings(), 10, loop)
    acceptor = Acceptor([], lambda _: pytest.fail("nothing is accepted"), table)
    acceptor._accept(Exhausted())  # type: ignore[arg-type]
    await asyncio.sleep(0.2)
    assert attempts == 1
    acceptor.close()
    listener.close()
    for _ in range(1000):
        handle_loop_errors(loop, {"message": "socket.accept() out of system resource", "exception": OSError(24, "no")})
    out = capsys.readouterr()
    assert (out.out + out.err).count("no connection can be accepted") <= 2


def test_the_limit_follows_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a setting the limit of connections leaves room for the service's own files; a setting wins."""
    limits = {"now": (1024, 1024)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["now"])
    assert connection_limit(ServerSettings(), 1) == 1024 - file_limit.RESERVED_FILES - file_limit.FILES_PER_ENGINE
    assert connection_limit(ServerSettings(max_connections=5), 1) == 5
    limits["now"] = (1_000_000, 1_000_000)
    assert connection_limit(ServerSettings(), 1) == file_limit.MAX_CONNECTIONS
    limits["now"] = (64, 64)
    assert connection_limit(ServerSettings(), 1) == file_limit.MIN_CONNECTIONS


def test_the_soft_limit_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The soft limit of open files becomes the hard one."""
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: raised.append(limit))
    file_limit.raise_file_limit()
    assert raised == [(4096, 4096)]


def test_a_throttle_counts_what_it_does_not_say(capsys: pytest.CaptureFixture[str]) -> None:
    """A thousand warnings in a second are one line, and the next line has their number."""
    throttle = LogThrottle("it happens")
    for _ in range(1000):
        throttle.warn(10.0)
    throttle.warn(11.5)
    out = capsys.readouterr()
    assert (out.out + out.err).count("it happens") == 2
    assert "1000" in out.out + out.err
