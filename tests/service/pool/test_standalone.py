"""Engines of their own over TCP, found in a real Redis: failover, arrivals and departures."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import msgspec
import pytest

from cache_store.redis_store import RedisStore
from service.pool.settings import PoolSettings
from tests.service.conftest import Service, StartService
from tests.service.pool.standalone import StartEngine, num_running
from tests.service.pool.test_failover import TEXT, ask, body


def num_serving(service: Service) -> int:
    return len(service.front.client.serving)


async def test_fronts_find_engines_and_streams_outlive_them(
    start_service: StartService, start_engine: StartEngine, pool: PoolSettings
) -> None:
    """A front without engines serves with those it finds; when the one that serves a stream is gone another goes on."""
    engines = [await start_engine(), await start_engine()]
    service = await start_service(pool=pool)
    await service.until(lambda: num_serving(service) == 2)
    undisturbed = await ask(service, body(1))
    for victim in (signal.SIGKILL, signal.SIGSTOP):
        asking = asyncio.create_task(ask(service, body(1)))
        await service.until(lambda: service.front.client.num_live == 1)
        await asyncio.sleep(0.3)
        (busy,) = [member for member in service.front.client.members.values() if member.flights]
        engine = next(each for each in engines if busy.address.endswith(f":{each.port}"))
        engine.send(victim)
        assert await asking == undisturbed
        await service.until(lambda: num_serving(service) == 1)
        engines.append(await start_engine())
        await service.until(lambda: num_serving(service) == 2)
    await service.until(lambda: len(service.front.client.members) == 2)
    await service.until_idle()


async def test_what_engines_elsewhere_hold_is_told(
    start_service: StartService, start_engine: StartEngine, pool: PoolSettings
) -> None:
    """/v1/cache and /v1/engines say of an engine that was found in the store how many blocks it holds."""
    await start_engine()
    service = await start_service(pool=pool)
    assert (await service.post(TEXT, {"prompt": list(range(3, 83)), "max_tokens": 2}))[0] == 200
    async with asyncio.timeout(30):
        while [each["blocks_held"] for each in (await service.get("/v1/cache"))[1]["engines"]] != [5]:
            await asyncio.sleep(0.05)
    (engine,) = (await service.get("/v1/engines"))[1]["data"]
    assert (engine["blocks_held"], engine["address"][:16]) == (5, "tcp://127.0.0.1:")


async def test_an_engine_that_joins_is_warm(
    start_service: StartService, start_engine: StartEngine, pool: PoolSettings
) -> None:
    """What was asked of the pool before is in an engine that comes later when it serves: nobody has asked it yet."""
    first = await start_engine("--warm-seconds", "60")
    service = await start_service(pool=msgspec.structs.replace(pool, warm_seconds=60.0))
    shared = list(range(3, 83))
    for number in range(3):
        assert (await service.post(TEXT, {"prompt": [*shared, number], "max_tokens": 2}))[0] == 200
    await service.front.popularity.flush()
    assert await first.stop(signal.SIGTERM) == 0
    second = await start_engine("--warm-seconds", "60")
    assert '"prefixes": 1' in second.log()
    await service.until(lambda: num_serving(service) == 1)
    async with asyncio.timeout(30):
        while [each["blocks_held"] for each in (await service.get("/v1/cache"))[1]["engines"]] != [5]:
            await asyncio.sleep(0.05)


async def test_a_worker_that_dies_is_restarted_beside_the_stream(
    start_service: StartService, start_engine: StartEngine, pool: PoolSettings
) -> None:
    """When only the model's process is killed its fronts know at once, and serve with it again when it is back."""
    engine = await start_engine()
    service = await start_service(pool=pool)
    undisturbed = await ask(service, body(3))
    asking = asyncio.create_task(ask(service, body(3)))
    await service.until(lambda: service.front.client.num_live == 1)
    await asyncio.sleep(0.3)
    os.kill(engine.worker_pid, signal.SIGKILL)
    assert await asking == undisturbed


async def test_a_front_that_is_killed_leaves_nothing_running(
    start_service: StartService, start_engine: StartEngine, pool: PoolSettings, model_folder: Path
) -> None:
    """Its requests are aborted and their blocks free, while another front's request on the same engine goes on."""
    await start_engine()
    service = await start_service(pool=pool)
    other = await start_front(pool, model_folder)
    await service.until(lambda: num_running(service) == 4)
    asking = asyncio.create_task(ask(service, body(4, max_tokens=220)))
    await service.until(lambda: num_running(service) == 5)
    other.kill()
    await other.wait()
    await service.until(lambda: num_running(service) == 1)
    assert (await asking)["usage"][1] == 220
    await service.until_idle()


async def start_front(pool: PoolSettings, folder: Path) -> asyncio.subprocess.Process:
    """A front in a process of its own, with four long requests."""
    code = f"""
import asyncio, msgspec
from service.app import create_app
from service.context import FRONT
from service.pool.settings import PoolSettings
from service.server import create_runner
from service.settings import Settings
from speculation.messages import SamplingParams, Submit

async def main():
    pool = msgspec.json.decode({msgspec.json.encode(pool)!r}, type=PoolSettings)
    app = create_app(Settings(pool=pool))
    await create_runner(app).setup()
    await app[FRONT].became_ready.wait()
    sampling = SamplingParams(max_tokens=100_000, ignore_eos=True)
    submits = [
        Submit(request_id=str(i), prompt_token_ids=[5, 6], sampling=sampling, cache_salt="slow") for i in range(4)
    ]
    async with app[FRONT].client.submit(submits) as stream:
        while True:
            await stream.take()

asyncio.run(main())
"""
    return await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.DEVNULL)


async def test_draining_over_the_network(
    start_service: StartService, start_engine: StartEngine, pool: PoolSettings
) -> None:
    """A drained engine ends what it has for every front, takes no more from any, and exits with 0."""
    engine = await start_engine()
    first, second = await start_service(pool=pool), await start_service(pool=pool)
    wanted = await ask(first, body(5))
    asking = [asyncio.create_task(ask(service, body(5))) for service in (first, second)]
    await first.until(lambda: num_running(first) == 2)
    (member,) = first.front.client.members.values()
    assert (await first.post(f"/v1/engines/{member.engine_id}/drain", {}))[0] == 202
    await second.until(lambda: not second.front.is_ready)
    assert (await second.post(TEXT, {"prompt": "hi"}))[0] == 503
    assert await asyncio.gather(*asking) == [wanted, wanted]
    async with asyncio.timeout(20):
        assert await engine.process.wait() == 0


async def test_a_termination_drains(start_service: StartService, start_engine: StartEngine, pool: PoolSettings) -> None:
    """On SIGTERM an engine finishes what it has, exits with 0 and is out of the store at once."""
    engine = await start_engine()
    service = await start_service(pool=pool)
    asking = asyncio.create_task(ask(service, body(6)))
    await service.until(lambda: num_running(service) == 1)
    engine.send(signal.SIGTERM)
    assert (await asking)["usage"][1] == 186
    async with asyncio.timeout(20):
        assert await engine.process.wait() == 0
    store = RedisStore(pool.store, namespace=pool.namespace, timeout_seconds=2.0)
    assert await store.engines() == []
    await store.close()


async def test_engines_of_different_models_are_never_mixed(
    start_service: StartService, start_engine: StartEngine, pool: PoolSettings
) -> None:
    """In one namespace, a front serves with engines of one model, whatever else is announced there, and says so."""
    await start_engine(fingerprint="a")
    service = await start_service(pool=pool)
    await start_engine(fingerprint="b")
    await start_engine(fingerprint="a")
    await service.until(lambda: num_serving(service) == 2)
    await asyncio.sleep(2.5)
    assert {member.ready and member.ready.model_fingerprint for member in service.front.client.serving} == {"a"}
    assert len(service.front.client.members) == 2


async def test_an_engine_that_lies_about_its_model_is_not_used(
    start_service: StartService, start_engine: StartEngine, pool: PoolSettings
) -> None:
    """What counts is what the engine itself says when it is connected, not what the store says of it."""
    await start_engine(fingerprint="a")
    service = await start_service(pool=pool)
    liar = await start_engine(fingerprint="b")
    store = RedisStore(pool.store, namespace=pool.namespace, timeout_seconds=2.0)
    for _ in range(30):
        for status in await store.engines():
            if status.address.endswith(f":{liar.port}"):
                claim = msgspec.structs.replace(status, engine_id="liar", model_fingerprint="a")
                await store.announce(claim)
        await asyncio.sleep(0.1)
    await store.close()
    assert "liar" in service.front.client.members
    assert {member.ready and member.ready.model_fingerprint for member in service.front.client.serving} == {"a"}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--listen", "0.0.0.0:0"], "which others can reach: set secret (FORERUN_SECRET)"),
        (["--listen", "nowhere"], "listen is 'nowhere'; it must be HOST:PORT"),
        (["--listen", "127.0.0.1:99999"], "it must be HOST:PORT"),
        (["--store", "memory"], "store is memory; a stand-alone engine is found through a store"),
        (["--tls-cert", "x.pem"], "tls_key, tls_ca missing"),
    ],
)
async def test_an_engine_that_cannot_be_served_safely_does_not_start(
    start_engine: StartEngine, flags: list[str], says: str
) -> None:
    """The reason names the setting and what is right; the exit status is 1."""
    engine = await start_engine(*flags, environment={"FORERUN_SECRET": ""}, wait=False)
    async with asyncio.timeout(30):
        assert await engine.process.wait() == 1
    assert says in engine.log().replace('\\"', '"')


async def test_a_port_that_is_taken_is_told(start_engine: StartEngine) -> None:
    """Two engines cannot have one port: the second says so and exits with 1."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        engine = await start_engine("--listen", f"127.0.0.1:{taken.getsockname()[1]}", wait=False)
        async with asyncio.timeout(30):
            assert await engine.process.wait() == 1
    assert "cannot listen" in engine.log()


async def test_clocks_that_disagree_change_nothing(
    start_service: StartService, start_engine: StartEngine, pool: PoolSettings
) -> None:
    """An engine whose clock is a day ahead is found, used, and forgotten within seconds of its death like any other."""
    code = "import sys, time, runpy; now = time.time; time.time = lambda: now() + 86400; "
    code += "sys.argv = sys.argv[3:]; runpy.run_module(sys.argv[0], run_name='__main__')"
    engine = await start_engine(prefix=(sys.executable, "-c", code))
    service = await start_service(pool=pool)
    assert (await service.post(TEXT, {"prompt": "hi"}))[0] == 200
    await engine.stop()
    await service.until(lambda: not service.front.client.members)
