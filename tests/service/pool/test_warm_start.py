"""A fresh engine computes what the pool is asked for before it serves, for as long as it may."""

from __future__ import annotations

import asyncio
import os
import signal

from cache_store.metadata import HotPrefix
from service.pool.settings import PoolSettings
from service.pool.warm_start import warm
from speculation.messages import Abort
from tests.service.conftest import StartService
from tests.service.pool.conftest import READY, make_pool, output, submit


def hot(token_ids: list[int], salt: str = "", *, fingerprint_salt: str | None = None) -> HotPrefix:
    pool = make_pool(1)
    hashes = pool.prefixes.hashes(READY, submit("x", prompt=[*token_ids, 1], salt=fingerprint_salt or salt))
    return HotPrefix(
        block_hash=hashes[-1], num_tokens=len(token_ids), uses=1.0, token_ids=tuple(token_ids), cache_salt=salt
    )


async def test_hot_prefixes_are_computed_most_popular_first() -> None:
    """One request a prefix, under the salt it was asked with, one after the other; then all of them are warm."""
    pool = make_pool(1)
    (engine,) = pool.engines
    prefixes = [hot(list(range(32))), hot(list(range(48)), "tenant a")]
    warming = asyncio.create_task(warm(engine.member, prefixes, 10.0))
    for number, prefix in enumerate(prefixes):
        while len(engine.submitted) == number:
            await asyncio.sleep(0)
        sent = engine.submitted[-1]
        assert (tuple(sent.prompt_token_ids[:-1]), sent.cache_salt) == (prefix.token_ids, prefix.cache_salt)
        assert len(engine.submitted) == number + 1
        engine.say(output(sent.request_id, 1, finish="length"))
    assert await warming == 2
    assert engine.member.flights == {}


async def test_what_is_of_another_model_or_cut_is_left_out() -> None:
    """A prefix whose hash is not that of its tokens under this model is not computed."""
    pool = make_pool(1)
    foreign = hot(list(range(32)), fingerprint_salt="another root")
    untold = HotPrefix(block_hash=b"x" * 16, num_tokens=32, uses=1.0)
    assert await warm(pool.engines[0].member, [foreign, untold], 10.0) == 0
    assert pool.engines[0].submitted == []


async def test_a_warm_start_has_an_end() -> None:
    """When time is up the rest is aborted; so it is when the engine dies meanwhile, and nothing goes on elsewhere."""
    pool = make_pool(2)
    first, second = pool.engines
    assert await warm(first.member, [hot(list(range(32)))], 0.01) == 0
    assert isinstance(first.sent[-1], Abort)
    warming = asyncio.create_task(warm(first.member, [hot(list(range(32)))], 10.0))
    while len(first.submitted) < 2:
        await asyncio.sleep(0)
    first.die()
    assert await warming <= 1
    assert second.submitted == []
    assert pool.pool.num_waiting == 0


async def test_a_restarted_engine_is_warm_when_it_serves(start_service: StartService) -> None:
    """What several requests shared is in the new engine before it takes the first request."""
    service = await start_service(pool=PoolSettings(engines=1, warm_seconds=10.0))
    shared = list(range(3, 83))
    for number in range(3):
        assert (await service.post("/v1/completions", {"prompt": [*shared, number], "max_tokens": 2}))[0] == 200
    await service.front.popularity.flush()
    pid = service.supervisor.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await service.until(lambda: service.supervisor.pid not in {None, pid} and service.front.is_ready)
    (engine,) = (await service.get("/v1/engines"))[1]["data"]
    assert engine["blocks_held"] == len(shared) // 16
