"""What goes wrong in real life, on the embedded model: clients that leave, an engine that is killed, a shutdown."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from target.embedded import embedded_model_dir
from target.errors import CheckpointError
from tests.e2e.server import Server

LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True}
ENDLESS: dict[str, Any] = {**LONG, "max_tokens": 1500, "speculation": "none"}
"""Takes longer than any deadline here, on any machine."""
STEPS = "forerun_step_seconds_count"
"""Only grows; what is running now may have ended before anybody looks."""


@pytest.fixture
def own_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """A service for one test, to be hurt; the parameter is how many seconds it waits for the running when it ends."""
    try:
        embedded_model_dir()
    except CheckpointError:
        pytest.skip("the embedded model is not fetched; `forerun fetch` fetches it")
    seconds = getattr(request, "param", "2")
    flags = ("--num-blocks", "128", "--shutdown-seconds", seconds, "--failover-seconds", "0.01")
    with Server(tmp_path / "log", *flags) as running:
        yield running


async def test_departing_clients_leave_no_block_in_use(server: Server) -> None:
    """After requests on all protocols, most of whose clients leave some time, every block is free or cached."""
    rng = random.Random(5)
    prompts = ["Once upon a time", "The list: 1, 2, 3, 4, 5,", "def main():\n    " * 8]

    async def visit(client: aiohttp.ClientSession, number: int) -> None:
        body = {**LONG, "prompt": prompts[number % 3], "n": 1 + number % 2, "stream": number % 4 == 0}
        patience = rng.uniform(0.0, 1.5)
        try:
            async with asyncio.timeout(patience):
                if number % 4 == 1:
                    async with client.ws_connect(f"{server.url}/v1/stream") as ends:
                        await ends.send_json({"type": "generate", "id": "a", "request": {**body, "stream": False}})
                        async for _ in ends:
                            pass
                async with client.post(f"{server.url}/v1/completions", json=body) as response:
                    await response.read()
        except TimeoutError:
            pass

    async with aiohttp.ClientSession() as client:
        for _ in range(4):
            await asyncio.gather(*(visit(client, number) for number in range(12)))
    server.wait_until_idle()
    assert server.metric("forerun_client_departures_total") > 0
    assert server.metric("forerun_engine_restarts_total") == 0


async def test_a_killed_engine_is_reported_and_replaced(own_server: Server) -> None:
    """Where nobody takes over in time a stream ends with an error event; it is replaced, and serves again."""
    pid = own_server.engine_pid()
    async with aiohttp.ClientSession() as client:
        body = {**ENDLESS, "stream": True, "seed": 1, "temperature": 0}
        async with client.post(f"{own_server.url}/v1/completions", json=body) as response:
            await response.content.readline()
            os.kill(pid, signal.SIGKILL)
            text = await response.text()
        error = json.loads(text.strip().rpartition("data: ")[2])["error"]
        assert (error["code"], error["type"]) == ("engine_died", "service_unavailable_error")
        async with client.get(f"{own_server.url}/health/ready") as response:
            assert response.status == 503
        async with asyncio.timeout(240):
            while True:
                async with client.get(f"{own_server.url}/health/ready") as response:
                    if response.status == 200:
                        break
                await asyncio.sleep(0.1)
        async with client.post(
            f"{own_server.url}/v1/completions", json={**body, "stream": False, "max_tokens": 4}
        ) as response:
            assert response.status == 200
    assert own_server.engine_pid() != pid
    assert own_server.metric("forerun_engine_restarts_total") == 1


@pytest.mark.parametrize("own_server", ["200"], indirect=True)
async def test_a_termination_lets_the_running_finish(own_server: Server) -> None:
    """On SIGTERM a running answer comes to its end, a new request is told that the service goes, and the exit is 0."""
    body = {**LONG, "speculation": "none", "stream": True, "stream_options": {"include_usage": True}}
    async with aiohttp.ClientSession() as client:
        async with client.post(f"{own_server.url}/v1/completions", json=body) as response:
            await response.content.readline()
            own_server.process.terminate()
            assert await until_refused(client, own_server) == "shutting_down"
            *_, bill, done, _ = (await response.text()).split("\n\n")
        assert done == "data: [DONE]"
        assert json.loads(bill.removeprefix("data: "))["usage"]["completion_tokens"] == LONG["max_tokens"]
    assert await asyncio.to_thread(own_server.process.wait, 60) == 0


@pytest.mark.parametrize("own_server", ["0.5"], indirect=True)
async def test_a_termination_has_a_deadline(own_server: Server) -> None:
    """An answer that would take longer than the deadline ends with an error, and the process is gone in time."""
    pid = own_server.engine_pid()
    async with aiohttp.ClientSession() as client:
        async with working(own_server):
            inside = [asyncio.create_task(post(client, own_server, ENDLESS)) for _ in range(4)]
        started = time.monotonic()
        assert await asyncio.to_thread(own_server.stop) == 0
        statuses = [status for status, _ in await asyncio.gather(*inside)]
    assert 503 in statuses
    assert time.monotonic() - started < 30
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_front_that_is_killed_leaves_nothing(own_server: Server, hangs: bool) -> None:
    """When the front is killed outright, its engine ends, even one that hangs, and no folder of theirs is left."""
    pid = own_server.engine_pid()
    command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    meeting_point = Path(command[command.index("--socket") + 1])
    if hangs:
        os.kill(pid, signal.SIGSTOP)
    own_server.stop(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not meeting_point.parent.exists()


async def test_a_reader_that_stalls_holds_back_nobody(server: Server) -> None:
    """While a client asks for a long stream and never reads, others are answered."""
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps({**LONG, "stream": True, "logprobs": 20}).encode()
    with socket.create_connection((host, int(port))) as client:
        async with working(server):
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
            client.sendall(head.encode() + data)
        async with aiohttp.ClientSession() as session:
            status, _ = await post(session, server, {"prompt": "One two", "max_tokens": 3})
        assert status == 200
    server.wait_until_idle()


async def post(client: aiohttp.ClientSession, server: Server, body: dict[str, Any]) -> tuple[int, Any]:
    async with client.post(f"{server.url}/v1/completions", json=body) as response:
        return response.status, await response.json()


async def until_refused(client: aiohttp.ClientSession, server: Server) -> str:
    """Ask until the service takes no more; the code of what it says then."""
    async with asyncio.timeout(60):
        while True:
            status, answer = await post(client, server, {"prompt": "One two", "max_tokens": 1})
            if status != 200:
                return str(answer["error"]["code"])


@asynccontextmanager
async def working(server: Server) -> AsyncIterator[None]:
    """On leaving, wait until the engine has begun with what was asked inside. It may have ended since."""
    before = await asyncio.to_thread(server.metric, STEPS)
    yield
    async with asyncio.timeout(60):
        while await asyncio.to_thread(server.metric, STEPS) == before:
            await asyncio.sleep(0.02)
