"""A Redis that is killed, paused, emptied, too old, locked or full costs a hint, never an answer, and recovers."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from cache_store.redis_store import RedisStore
from service.pool.settings import PoolSettings
from speculation.messages import SamplingParams, Submit
from tests.redis_server import RedisServer
from tests.service.conftest import Service, StartService
from tests.service.pool.standalone import SECRET, Standalone
from tests.service.pool.test_failover import TEXT

StartEngine = Callable[[PoolSettings], Awaitable[Standalone]]
PROMPT = list(range(3, 103))


def settings(redis: RedisServer, **changes: object) -> PoolSettings:
    pool = PoolSettings(engines=1, store=redis.url, namespace=secrets.token_hex(8), store_timeout=0.5, secret=SECRET)
    return msgspec.structs.replace(pool, **changes)


async def is_served(service: Service) -> bool:
    """Whether a request is answered now."""
    status, _ = await service.post(TEXT, {"prompt": PROMPT, "max_tokens": 3})
    return status == 200


async def num_known(service: Service, pool: PoolSettings, redis: RedisServer) -> int:
    """How many blocks of the prompt the store knows some engine of the service to hold."""
    submit = Submit(request_id="x", prompt_token_ids=PROMPT, sampling=SamplingParams())
    ready = service.front.model.ready
    store = RedisStore(redis.url, namespace=pool.namespace, timeout_seconds=5.0)
    try:
        held = await store.lookup(service.front.prefixes.hashes(ready, submit), list(service.front.client.members))
    finally:
        await store.close()
    return max(held.values(), default=0)


async def until_known(service: Service, pool: PoolSettings, redis: RedisServer) -> None:
    async with asyncio.timeout(30):
        while await num_known(service, pool, redis) != len(PROMPT) // 16:
            await asyncio.sleep(0.05)


def kill(redis: RedisServer) -> None:
    redis.kill()


def pause(redis: RedisServer) -> None:
    redis.pause()


def replace_by_an_older_one(redis: RedisServer) -> None:
    """As Redis 6.0 is: it has the protocol, and not the command that look-ups need."""
    redis.replace("--rename-command", "SMISMEMBER", "")


def change_the_password(redis: RedisServer) -> None:
    redis.replace(password="another")


def fill_the_memory(redis: RedisServer) -> None:
    """It evicts nothing, and so goes on to answer what is only read."""
    redis.command("CONFIG", "SET", "maxmemory", "1")


FAULTS: dict[Callable[[RedisServer], None], Callable[[RedisServer], object]] = {
    kill: lambda redis: redis.start(),
    pause: lambda redis: redis.resume(),
    replace_by_an_older_one: lambda redis: redis.replace(),
    change_the_password: lambda redis: redis.replace(),
    fill_the_memory: lambda redis: redis.command("CONFIG", "SET", "maxmemory", "0"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_requests_are_served_without_redis(
    start_service: StartService, start_redis: Callable[..., RedisServer], fault: Callable[[RedisServer], None]
) -> None:
    """Whatever becomes of it: requests are served and a gauge tells; when it is back it knows what the engines hold."""
    redis = start_redis()
    pool = settings(redis)
    service = await start_service(pool=pool)
    assert await is_served(service)
    await until_known(service, pool, redis)
    fault(redis)
    assert all([await is_served(service) for _ in range(3)])
    await service.until(lambda: not service.front.store.health.is_up)
    with capture_logs() as logs:
        for _ in range(4):
            await asyncio.sleep(0.5)
            assert await is_served(service)
    assert not [entry["event"] for entry in logs if "metadata store" in entry["event"]]
    assert "forerun_store_up 0.0" in (await service.get("/metrics"))[1]
    cache = (await service.get("/v1/cache"))[1]
    assert (cache["store"]["kind"], cache["store"]["is_up"], cache["hot_prefixes"]) == ("redis", False, [])
    assert await is_served(service)
    FAULTS[fault](redis)
    await service.until(lambda: service.front.store.health.is_up)
    await until_known(service, pool, redis)
    assert "forerun_store_up 1.0" in (await service.get("/metrics"))[1]


async def test_a_flushed_redis_is_filled_again(
    start_service: StartService, start_redis: Callable[..., RedisServer]
) -> None:
    """After FLUSHALL and a flush of the scripts everything is there again within a heartbeat."""
    redis = start_redis()
    pool = settings(redis)
    service = await start_service(pool=pool)
    assert await is_served(service)
    await until_known(service, pool, redis)
    redis.flush()
    await until_known(service, pool, redis)
    assert service.front.store.health.is_up


async def test_a_restarted_engine_holds_nothing(
    start_service: StartService, start_redis: Callable[..., RedisServer]
) -> None:
    """What a dead engine held is forgotten with it, and known again when its next life has computed it."""
    redis = start_redis()
    pool = settings(redis)
    service = await start_service(pool=pool)
    assert await is_served(service)
    await until_known(service, pool, redis)
    pid = service.supervisor.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await service.until(lambda: service.front.is_ready and service.supervisor.pid != pid)
    async with asyncio.timeout(30):
        while await num_known(service, pool, redis):
            await asyncio.sleep(0.05)
    assert await is_served(service)
    await until_known(service, pool, redis)


@pytest.mark.parametrize("kind", ["wrong password", "too old", "nothing there"])
async def test_a_redis_that_is_of_no_use_from_the_start(
    start_service: StartService, start_redis: Callable[..., RedisServer], kind: str
) -> None:
    """With a wrong password, without the protocol of 6, or with nobody listening, the service starts and serves."""
    if kind == "wrong password":
        redis = start_redis(password="right")
        url = redis.url_with("wrong")
    elif kind == "too old":
        redis = start_redis("--rename-command", "HELLO", "")
        url = redis.url
    else:
        redis = start_redis()
        url = redis.url
        redis.kill()
    service = await start_service(pool=settings(redis, store=url, engines=2))
    await service.until(lambda: len(service.front.client.serving) == 2)
    assert all([await is_served(service) for _ in range(4)])
    await service.until(lambda: not service.front.store.health.is_up)


@pytest.fixture
async def engine_of(model_folder: Path, tmp_path: Path) -> AsyncIterator[StartEngine]:
    """Starts a stand-alone engine in the store of some settings."""
    engines: list[Standalone] = []

    async def start(pool: PoolSettings) -> Standalone:
        flags = ["--store", pool.store, "--namespace", pool.namespace, "--store-timeout", "0.5"]
        engine = await Standalone.start(
            model_folder, tmp_path / f"{len(engines)}.log", *flags, environment={"FORERUN_SECRET": SECRET}
        )
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        await engine.stop()


async def test_connected_engines_serve_on_without_redis(
    start_service: StartService,
    start_redis: Callable[..., RedisServer],
    engine_of: StartEngine,
) -> None:
    """Engines that were found stay connected when the store dies; a front that comes later finds them again."""
    redis = start_redis()
    pool = settings(redis, engines=0)
    await asyncio.gather(*(engine_of(pool) for _ in range(2)))
    service = await start_service(pool=pool)
    await service.until(lambda: len(service.front.client.serving) == 2)
    redis.kill()
    await service.until(lambda: not service.front.store.health.is_up)
    await asyncio.sleep(7.0)
    assert len(service.front.client.serving) == 2
    assert await is_served(service)
    redis.start()
    later = await start_service(pool=pool)
    await later.until(lambda: len(later.front.client.serving) == 2)
    assert await is_served(later)


async def test_a_full_redis_is_one_outage(
    start_service: StartService, start_redis: Callable[..., RedisServer], engine_of: StartEngine
) -> None:
    """A front that hardly writes reads what is left in a full Redis: it warns once all the same, and is back once."""
    redis = start_redis()
    pool = settings(redis, engines=0, store_timeout=2.0)
    await engine_of(pool)
    service = await start_service(pool=pool)
    assert await is_served(service)
    await until_known(service, pool, redis)
    with capture_logs() as logs:
        fill_the_memory(redis)
        for _ in range(20):
            assert await is_served(service)  # each is a use of a prefix, to be recorded
            await asyncio.sleep(0.3)
        assert not service.front.store.health.is_up
        assert "forerun_store_up 0.0" in (await service.get("/metrics"))[1]
        FAULTS[fill_the_memory](redis)
        await service.until(lambda: service.front.store.health.is_up)
        await until_known(service, pool, redis)
    assert [(entry["log_level"], entry["event"]) for entry in logs if "metadata store" in entry["event"]] == [
        ("warning", "metadata store is unavailable; serving without it"),
        ("info", "metadata store is back"),
    ]
    assert "maxmemory" in next(entry["reason"] for entry in logs if "metadata store" in entry["event"])


async def test_a_password_that_is_rotated(
    start_service: StartService, start_redis: Callable[..., RedisServer], engine_of: StartEngine
) -> None:
    """Once new connections are refused, requests are answered without the store, and one log line says why."""
    redis = start_redis(password="old-password")
    pool = settings(redis, engines=1, store_timeout=2.0)
    await engine_of(pool)
    service = await start_service(pool=pool)
    await service.until(lambda: len(service.front.client.serving) == 2)
    assert await is_served(service)
    await until_known(service, pool, redis)
    with capture_logs() as logs:
        assert redis.command("CONFIG", "SET", "requirepass", "new-password") == "+OK"
        redis.set_password("new-password")
        assert all(await asyncio.gather(*(is_served(service) for _ in range(12))))
        redis.command("CLIENT", "KILL", "TYPE", "normal")
        await service.until(lambda: not service.front.store.health.is_up)
        assert all([await is_served(service) for _ in range(8)])
        await asyncio.sleep(2.0)
        assert len(service.front.client.serving) == 2
        # Both are right for a while: what a rotation without an outage does first.
        assert redis.command("ACL", "SETUSER", "default", ">old-password") == "+OK"
        await service.until(lambda: service.front.store.health.is_up)
        await until_known(service, pool, redis)
    told = [entry for entry in logs if "metadata store" in entry["event"]]
    assert [entry["log_level"] for entry in told] == ["warning", "info"]
    assert "invalid username-password pair" in told[0]["reason"]
    assert "-password" not in str(logs).replace("username-password", "")
    assert (await service.get("/v1/engines"))[0] == 200
