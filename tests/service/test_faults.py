"""Clients that leave or do not read, engines that die, services that shut down: on a scripted engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path

import aiohttp
import pytest

from service.engine_client import EngineUnavailableError
from service.settings import ServerSettings
from service.supervisor import EngineStartError
from tests.service.conftest import Service, StartService, parse_events

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
LONG = {"prompt": "hi", "cache_salt": "slow", "ignore_eos": True, "max_tokens": 200}


async def test_a_client_that_leaves_a_stream_ends_its_generation(service: Service) -> None:
    """When the connection closes mid-stream the sequence is aborted and holds no block; the departure is counted."""
    async with service.client.post(service.url + TEXT, json={**LONG, "stream": True}) as response:
        await response.content.readline()
        assert service.front.client.num_live == 1
        response.close()
    await service.until_idle()
    assert "forerun_client_departures_total 1.0" in (await service.get("/metrics"))[1]


@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_leaves_before_its_answer_ends_its_generation(service: Service, n: int) -> None:
    """The same where the answer was to come whole, for all of its choices."""
    request = asyncio.create_task(service.post(TEXT, {**LONG, "n": n}))
    await service.until(lambda: service.front.client.num_live == n)
    request.cancel()
    await service.until_idle()


async def test_a_client_that_leaves_at_once_leaves_nothing(service: Service) -> None:
    """A connection that closes right behind its request, many times over, leaves no sequence."""
    host, port = service.url.removeprefix("http://").split(":")
    body = json.dumps(LONG).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    for delay in (0, 0, 0, 0.001, 0.002, 0.005, 0.01) * 3:
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(head + body)
        await writer.drain()
        await asyncio.sleep(delay)
        writer.close()
    await service.until_idle()
    assert (await service.post(TEXT, {"prompt": "hi"}))[0] == 200


async def connect_and_never_read(service: Service, body: dict[str, object]) -> socket.socket:
    """A client with small buffers that asks and does not read."""
    host, port = service.url.removeprefix("http://").split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, (host, int(port)))
    data = json.dumps(body).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    await asyncio.get_running_loop().sock_sendall(client, head + data)
    return client


def many_tokens(prompt: str) -> dict[str, object]:
    """A request whose stream is far larger than what socket buffers hold."""
    logprobs = {"logprobs": 20, "return_token_ids": True}
    return {"prompt": prompt, "ignore_eos": True, "max_tokens": 40_000, "stream": True, "seed": 0, **logprobs}


async def test_a_reader_that_stalls_holds_back_nobody(start_service: StartService) -> None:
    """While one client does not read, others are answered at once, and the stalled one is dropped in the end."""
    service = await start_service(
        server=ServerSettings(stall_seconds=1.0), max_model_len=70_000, num_blocks=10_000, max_num_seqs=4
    )
    with await connect_and_never_read(service, many_tokens("hi")):
        await service.until(lambda: service.front.client.num_live == 1)
        for _ in range(5):
            status, _ = await service.post(TEXT, {"prompt": "The quick brown fox", "max_tokens": 20})
            assert status == 200
        await service.until(lambda: service.front.metrics.stalls._value.get() == 1)
        await service.until_idle()


async def test_a_slow_reader_gets_everything(start_service: StartService) -> None:
    """A client that pauses, for less than the limit, misses nothing: what it missed comes in fewer, larger chunks."""
    service = await start_service(max_model_len=70_000, num_blocks=10_000)
    body = {**many_tokens("hi"), "max_tokens": 12_000}
    data = b""
    with await connect_and_never_read(service, body) as client:
        await service.until(lambda: service.front.client.num_live == 1)
        await service.until_idle()
        async with asyncio.timeout(30):
            while not data.endswith(b"0\r\n\r\n"):
                data += await asyncio.get_running_loop().sock_recv(client, 1 << 16)
    pieces = data.partition(b"\r\n\r\n")[2].split(b"\r\n")
    events = parse_events(b"".join(pieces[1::2]).decode())
    token_ids = [token for event in events[:-1] for choice in event["choices"] for token in choice["token_ids"]]
    assert len(token_ids) == 12_000
    assert events[-2]["metrics"]["timing"]["tokens"] == 12_000
    assert len(events) < 12_000 / 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_kills_engines_is_given_up(service: Service, stream: bool) -> None:
    """It is tried five times and then gets a clear error; the engine is replaced, and others are served again."""
    pid = service.supervisor.pid
    body = {"prompt": "hi there", "cache_salt": "die", "stream": stream, "max_tokens": 50, "ignore_eos": True}
    async with service.client.post(service.url + TEXT, json=body) as response:
        text = await response.text()
        error = parse_events(text)[-1]["error"] if stream else json.loads(text)["error"]
        assert response.status == (200 if stream else 503)
    assert (error["code"], error["type"]) == ("engine_died", "service_unavailable_error")
    assert "SIGKILL" in error["message"]
    await service.until(lambda: service.front.is_ready)
    assert service.supervisor.pid != pid
    assert (await service.post(TEXT, {"prompt": "hi"}))[0] == 200
    assert "forerun_engine_restarts_total 5.0" in (await service.get("/metrics"))[1]


async def test_readiness_follows_the_engine(start_service: StartService, tmp_path: Path) -> None:
    """Until the engine serves, and while it is being replaced, readiness and requests are 503; liveness is 200."""
    gate = tmp_path / "gate"
    script = f'while [ ! -e {gate} ]; do sleep 0.01; done; exec "$@"'
    from service.settings import Settings
    from speculation.settings import EngineSettings
    from tests.service.conftest import scripted_command

    model = str((await start_service()).front.model.ready.model_folder)
    inner = scripted_command(Settings(engine=EngineSettings(model=model)))
    service = await start_service(command=["/bin/sh", "-c", script, "sh", *inner], wait=False, model=model)
    assert (await service.get("/health/live"))[0] == 200
    assert (await service.get("/health/ready"))[0] == 503
    assert (await service.get("/v1/models"))[0] == 503
    status, body = await service.post(TEXT, {"prompt": "hi"})
    assert (status, body["error"]["code"]) == (503, "engine_not_ready")
    gate.touch()
    await service.until(lambda: service.front.is_ready)
    assert (await service.get("/health/ready"))[0] == 200
    gate.unlink()
    assert service.supervisor.pid is not None
    os.kill(service.supervisor.pid, signal.SIGKILL)
    await service.until(lambda: not service.front.is_ready)
    assert (await service.get("/health/ready"))[0] == 503
    status, body = await service.post(TEXT, {"prompt": "hi"})
    assert (status, body["error"]["code"]) == (503, "engine_not_ready")
    assert "forerun_engine_up 0.0" in (await service.get("/metrics"))[1]
    gate.touch()
    await service.until(lambda: service.front.is_ready)
    assert (await service.post(TEXT, {"prompt": "hi"}))[0] == 200


@pytest.mark.parametrize(
    ("code", "says"),
    [("import sys; sys.exit(3)", "status 3"), ("import os; os.kill(os.getpid(), 9)", "SIGKILL")],
)
async def test_an_engine_that_never_serves_is_not_tried_again(
    start_service: StartService, code: str, says: str
) -> None:
    """An engine that ends before it is ready ends the service, with the reason."""
    service = await start_service(command=[sys.executable, "-c", code], wait=False)
    with pytest.raises(EngineStartError, match=says):
        await service.supervisor_life()


async def test_an_engine_that_hangs_while_loading_is_given_up(start_service: StartService) -> None:
    """An engine that does not connect in time ends the service."""
    service = await start_service(
        command=[sys.executable, "-c", "import time; time.sleep(60)"],
        wait=False,
        server=ServerSettings(load_seconds=0.5),
    )
    with pytest.raises(EngineStartError, match=r"within 0\.5 s"):
        await service.supervisor_life()


async def test_an_engine_that_talks_nonsense_is_replaced_or_given_up(start_service: StartService) -> None:
    """Bytes that are no message are a dead engine, not a hang."""
    code = (
        "import socket, sys, time; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[-1]); "
        "s.sendall(b'\\xff' * 64); s.recv(1)"
    )
    service = await start_service(command=[sys.executable, "-c", code], wait=False)
    with pytest.raises(EngineStartError, match="announces"):
        await service.supervisor_life()


async def test_a_model_the_front_cannot_use_is_an_error_at_start(start_service: StartService, tmp_path: Path) -> None:
    """A model folder without a tokenizer ends the service with that reason, instead of failing every request."""
    service = await start_service(model=str(tmp_path), wait=False)
    with pytest.raises(EngineStartError, match=r"no tokenizer\.json"):
        await service.supervisor_life()


async def test_shutting_down_lets_the_running_finish(service: Service) -> None:
    """After draining has begun new requests and readiness are 503, and those inside end as they would have."""
    inside = asyncio.create_task(service.post(TEXT, LONG))
    await service.until(lambda: service.front.client.num_live == 1)
    drained = asyncio.create_task(service.front.admission.drain(20))
    await asyncio.sleep(0)
    status, body = await service.post(TEXT, {"prompt": "hi"})
    assert (status, body["error"]["code"]) == (503, "shutting_down")
    assert (await service.get("/health/ready"))[0] == 503
    status, body = await inside
    assert (status, body["usage"]["completion_tokens"]) == (200, LONG["max_tokens"])
    assert await drained


async def test_shutting_down_cuts_off_who_takes_too_long(service: Service) -> None:
    """When the deadline passes, who is still inside gets an error that says why."""
    inside = asyncio.create_task(service.events(TEXT, {**LONG}))
    await service.until(lambda: service.front.client.num_live == 1)
    await asyncio.sleep(0.1)
    assert not await service.front.admission.drain(0.05)
    service.front.client.end_all(EngineUnavailableError("the service is shutting down", "shutting_down"))
    events = await inside
    assert events[-1]["error"]["code"] == "shutting_down"


async def test_the_engine_is_gone_when_the_service_is(start_service: StartService) -> None:
    """Closing the application ends the engine process, and its folder with it."""
    service = await start_service()
    pid = service.supervisor.pid
    assert pid is not None
    await service.app.cleanup()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(EngineUnavailableError):
        async with service.front.client.submit([]) as stream:
            await stream.take()


async def test_the_engine_dies_with_a_front_that_is_killed(tmp_path: Path, model_folder: Path) -> None:
    """A front that is killed outright leaves no engine behind."""
    code = f"""
import asyncio, os, sys
from service.settings import Settings
from service.app import create_app, ENGINES
from service.context import FRONT
from service.server import create_runner
from speculation.settings import EngineSettings
from tests.service.conftest import scripted_command

async def main():
    settings = Settings(engine=EngineSettings(model={str(model_folder)!r}))
    app = create_app(settings, scripted_command(settings))
    await create_runner(app).setup()
    await app[FRONT].became_ready.wait()
    print(app[ENGINES].supervisors["engine-0"].pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""
    front = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    assert front.stdout is not None
    pid = await _last_number(front.stdout)
    front.kill()
    await front.wait()
    async with asyncio.timeout(10):
        while is_alive(pid):
            await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not collected does not."""
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


async def _last_number(output: asyncio.StreamReader) -> int:
    """The number on a line of its own among lines of a log."""
    while True:
        line = (await output.readline()).strip()
        if line.isdigit():
            return int(line)


async def test_a_health_check_costs_no_engine(service: Service) -> None:
    """Health, models, speculation and metrics are answered by the front alone."""
    status, body = await service.get("/v1/speculation")
    assert status == 200
    assert body["methods"] == ["ngram", "none"]
    assert body["default"] is None
    assert [(one["name"], one["speculation"]["num_speculative_tokens"]) for one in body["profiles"]] == [("fast", 2)]
    status, body = await service.get("/v1/models")
    assert body["data"][0]["id"] == service.front.model.name
    assert body["data"][0]["max_model_len"] == 256


async def test_metrics_say_what_happened(service: Service) -> None:
    """Latencies, tokens and the engine's own numbers are there in Prometheus' format after a request."""
    await service.post(TEXT, {"prompt": "The quick brown fox", "max_tokens": 7, "ignore_eos": True})
    await service.until_idle()
    status, text = await service.get("/metrics")
    assert status == 200
    for line in (
        'forerun_ttft_seconds_count{method="auto"} 1.0',
        'forerun_tpot_seconds_count{method="auto"} 1.0',
        'forerun_end_to_end_seconds_count{method="auto"} 1.0',
        "forerun_inter_token_seconds_count 2.0",
        'forerun_tokens_total{kind="completion"} 7.0',
        'forerun_requests_total{route="/v1/completions",status="200"} 1.0',
        'forerun_kv_blocks{state="in_use"} 0.0',
        'forerun_engine_drafts_total{method="ngram"} 2.0',
        'forerun_accepted_at_position_total{position="2"} 1.0',
        'forerun_drafts_skipped_total{reason="disabled"} 1.0',
        "forerun_engine_up 1.0",
    ):
        assert line in text.splitlines(), line
    assert 'forerun_step_seconds_bucket{le="+Inf"}' in text


async def test_departed_clients_do_not_break_their_connection_s_successors(service: Service) -> None:
    """After many departures the service still answers on new connections."""
    for _ in range(10):
        with pytest.raises((TimeoutError, aiohttp.ClientError)):
            await service.post(TEXT, LONG, timeout=aiohttp.ClientTimeout(total=0.02))
    await service.until_idle()
    assert (await service.post(TEXT, {"prompt": "hi"}))[0] == 200
