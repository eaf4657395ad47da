"""Engines that are killed, stopped, drained and poisoned: real processes of the scripted engine behind one front."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from service.pool.settings import PoolSettings
from tests.service.conftest import Service, StartService, parse_events

TEXT = "/v1/completions"
TWO = PoolSettings(engines=2, silence_seconds=1.5)


def body(number: int, **changes: Any) -> dict[str, Any]:
    """One of many long streams; the same number is the same request."""
    return {
        "prompt": f"The quick brown fox number {number} jumps over the lazy dog",
        "seed": number,
        "cache_salt": "slow",
        "ignore_eos": True,
        "max_tokens": 180 + number % 7,
        "logprobs": 1,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
        **changes,
    }


def summary(events: list[Any]) -> dict[str, Any]:
    """A stream put together: all that does not depend on which engine gave it."""
    found: dict[str, Any] = {"text": "", "token_ids": [], "logprobs": 0, "finish_reason": None}
    for event in events:
        if event == "[DONE]":
            continue
        assert "error" not in event, event
        for choice in event["choices"]:
            found["text"] += choice["text"]
            found["token_ids"] += choice["token_ids"]
            found["logprobs"] += len(choice["logprobs"]["tokens"]) if choice["logprobs"] else 0
            found["finish_reason"] = choice["finish_reason"] or found["finish_reason"]
        if event.get("usage"):
            found["usage"] = (event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"])
    return found


async def ask(service: Service, request: dict[str, Any]) -> dict[str, Any]:
    return summary(await service.events(TEXT, request))


def hit(service: Service, number: signal.Signals, *, busy: bool = True) -> int:
    """Send a signal to an engine that has (or has no) sequences; its process id."""
    for engine_id, supervisor in zip(service.front.client.members, service.supervisors, strict=True):
        flights = service.front.client.members[engine_id].flights
        if supervisor.pid is not None and bool(flights) == busy:
            os.kill(supervisor.pid, number)
            return supervisor.pid
    raise AssertionError("there is no such engine")


async def until_all_serve(service: Service) -> None:
    await service.until(lambda: len(service.front.client.serving) == len(service.front.client.members))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
async def test_a_stream_outlives_its_engine(start_service: StartService, number: signal.Signals) -> None:
    """Killed or stopped in mid-stream, another engine goes on: same text, tokens, logprobs, usage; nothing twice."""
    service = await start_service(pool=TWO)
    await until_all_serve(service)
    undisturbed = await ask(service, body(1))
    async with service.client.post(service.url + TEXT, json={**body(1), "stream": True}) as response:
        begun = [(await response.content.readuntil(b"\n\n")).decode() for _ in range(10)]
        pid = hit(service, number)
        text = "".join(begun) + await response.text()
    assert summary(parse_events(text)) == undisturbed
    assert undisturbed["logprobs"] == undisturbed["usage"][1] == len(undisturbed["token_ids"]) == 181
    await until_all_serve(service)
    assert pid not in {supervisor.pid for supervisor in service.supervisors}
    await service.until_idle()
    metrics = (await service.get("/metrics"))[1]
    assert "forerun_pool_resumed_total 1.0" in metrics
    assert "forerun_engine_restarts_total 1.0" in metrics


async def test_an_engine_that_dies_before_its_first_output(start_service: StartService) -> None:
    """Killed while it computes the prompts of several requests: each is answered as if nothing had happened."""
    service = await start_service(pool=TWO)
    await until_all_serve(service)
    undisturbed = [await ask(service, body(number)) for number in range(4)]
    asking = asyncio.gather(*(ask(service, body(number)) for number in range(4)))
    await service.until(lambda: service.front.client.num_live == 4)
    hit(service, signal.SIGKILL)
    assert await asking == undisturbed


async def test_with_one_engine_a_stream_waits_for_its_restart(start_service: StartService) -> None:
    """The only engine is killed: the stream pauses, and goes on with the same tokens when the engine is back."""
    service = await start_service()
    undisturbed = await ask(service, body(2))
    asking = asyncio.create_task(ask(service, body(2)))
    await service.until(lambda: bool(service.front.client.num_live))
    await asyncio.sleep(0.2)
    hit(service, signal.SIGKILL)
    assert await asking == undisturbed


async def test_a_websocket_outlives_an_engine(start_service: StartService) -> None:
    """Several generations on one socket go on when engines die: every token once, in order, with its logprob."""
    service = await start_service(pool=TWO, max_model_len=512)
    await until_all_serve(service)
    requests = {f"{number}": body(number, max_tokens=300, stream_options=None) for number in range(6)}

    async def run(kill: bool) -> dict[str, list[Any]]:
        tokens: dict[str, list[Any]] = {name: [] for name in requests}
        async with service.client.ws_connect(f"{service.url}/v1/stream") as socket:
            for name, request in requests.items():
                await socket.send_json({"type": "generate", "id": name, "request": request})
            num_open, num_seen = len(requests), 0
            while num_open:
                async with asyncio.timeout(30):
                    message = json.loads(await socket.receive_str())
                num_seen += message["type"] == "tokens"
                if kill and message["type"] == "tokens" and num_seen in {40, 90}:
                    hit(service, signal.SIGKILL)
                if message["type"] == "tokens":
                    tokens[message["id"]] += [(token["id"], token["logprob"]) for token in message["tokens"]]
                assert message["type"] != "error", message
                num_open -= message["type"] == "finished"
        return tokens

    assert await run(kill=True) == await run(kill=False)
    await service.until_idle()


async def test_killing_under_load_changes_no_answer(start_service: StartService) -> None:
    """With engines killed and stopped all the time under 50 streams each answer is the undisturbed one."""
    rng = random.Random(11)
    service = await start_service(pool=TWO, max_num_seqs=64)
    await until_all_serve(service)
    wanted = await asyncio.gather(*(ask(service, body(number)) for number in range(50)))
    await service.until_idle()
    before = leftovers()
    asking = asyncio.gather(*(ask(service, body(number)) for number in range(50)))
    num_hit = 0
    while not asking.done():
        await asyncio.wait({asking}, timeout=rng.uniform(0.3, 0.8))
        # Engines may be done before their streams are read to the end.
        is_busy = any(member.flights for member in service.front.client.serving)
        if is_busy and len(service.front.client.serving) == 2:
            hit(service, rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP]))
            num_hit += 1
    assert await asking == wanted
    assert num_hit >= 2
    await until_all_serve(service)
    await service.until_idle()
    assert service.front.client.num_waiting == 0
    await service.until(lambda: leftovers() == before)
    pids = [supervisor.pid for supervisor in service.supervisors]
    assert sorted(pid for pid in children() if is_worker(pid)) == sorted(pid for pid in pids if pid is not None)


async def test_what_kills_engines_does_not_kill_them_all(start_service: StartService) -> None:
    """A request that kills what takes it gets an error after three; its neighbours end, and one engine serves on."""
    service = await start_service(pool=PoolSettings(engines=3, failover_attempts=3))
    await until_all_serve(service)
    neighbours = [asyncio.create_task(ask(service, body(number, max_tokens=200))) for number in range(6)]
    await service.until(lambda: service.front.client.num_live == 6)
    await asyncio.sleep(0.3)
    fewest = 3

    async def watch() -> None:
        nonlocal fewest
        while True:
            fewest = min(fewest, len(service.front.client.serving))
            await asyncio.sleep(0.001)

    watching = asyncio.create_task(watch())
    status, answer = await service.post(
        TEXT, {"prompt": "hi", "cache_salt": "die", "max_tokens": 50, "ignore_eos": True}
    )
    assert (status, answer["error"]["code"]) == (503, "engine_died")
    assert "3 engines died soon after they took it" in answer["error"]["message"]
    assert [answer["usage"][1] for answer in await asyncio.gather(*neighbours)] == [200] * 6
    watching.cancel()
    assert fewest >= 1
    await until_all_serve(service)
    assert (await service.post(TEXT, {"prompt": "hi"}))[0] == 200


async def test_a_drained_engine_loses_nothing_and_takes_nothing(start_service: StartService) -> None:
    """Over HTTP: its streams end as they would have, new ones go elsewhere, and then its process is gone for good."""
    service = await start_service(pool=TWO)
    await until_all_serve(service)
    wanted = [await ask(service, body(number)) for number in range(2)]
    asking = [asyncio.create_task(ask(service, body(number))) for number in range(2)]
    await service.until(lambda: service.front.client.num_live == 2)
    engine_id = next(each.engine_id for each in service.front.client.members.values() if each.flights)
    pid = service.app_supervisor(engine_id).pid
    async with service.client.post(f"{service.url}/v1/engines/{engine_id}/drain") as response:
        assert (response.status, (await response.json())["state"]) == (202, "draining")
    later = await asyncio.gather(*(ask(service, body(number)) for number in range(2)))
    assert await asyncio.gather(*asking) == later == wanted
    await service.until(lambda: service.front.client.members[engine_id].state == "drained")
    assert pid not in children()
    assert "forerun_pool_resumed_total 0.0" in (await service.get("/metrics"))[1]


async def test_draining_the_last_engine_leaves_a_front_that_says_so(start_service: StartService) -> None:
    """With every engine drained the service stays, answers 503 and is not ready."""
    service = await start_service()
    (engine,) = (await service.get("/v1/engines"))[1]["data"]
    assert (engine["state"], engine["address"], engine["deaths"]) == ("serving", "local", 0)
    assert (await service.post(f"/v1/engines/{engine['id']}/drain", {}))[0] == 202
    await service.until(lambda: service.front.client.members[engine["id"]].state == "drained")
    assert (await service.post(f"/v1/engines/{engine['id']}/drain", {}))[0] == 202
    status, answer = await service.post(TEXT, {"prompt": "hi"})
    assert (status, answer["error"]["code"]) == (503, "engine_not_ready")
    assert (await service.get("/health/ready"))[0] == 503
    assert (await service.get("/health/live"))[0] == 200


async def test_an_unknown_engine_cannot_be_drained(service: Service) -> None:
    """The error names the engine and the known ones."""
    status, answer = await service.post("/v1/engines/engine-7/drain", {})
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (404, "engine_not_found", "id")
    assert "engine-0" in answer["error"]["message"]


def leftovers() -> tuple[Counter[str], int]:
    """The tasks of this process that belong to engines, by what they run; and how many files and sockets are open."""
    names = Counter(str(task.get_coro().__qualname__) for task in asyncio.all_tasks())  # type: ignore[union-attr]
    ours = ("EngineLink", "Reporter", "LocalEngines", "OutputStream", "Answer")
    kept = Counter({name: count for name, count in names.items() if name.startswith(ours)})
    return kept, len(list(Path("/proc/self/fd").iterdir()))


def children() -> list[int]:
    pid = os.getpid()
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_worker(pid: int) -> bool:
    return b"scripted_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
