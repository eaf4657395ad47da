"""What becomes of a real Redis in trouble, and of those who ask it."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable

import pytest
from structlog.testing import capture_logs

from cache_store.block_publisher import BlockPublisher
from cache_store.guarded_store import GuardedStore
from cache_store.hashing import block_hashes, root_hash
from cache_store.metadata import BlockBatch, EngineStatus, PrefixUse, Retention, StoreUnavailable
from cache_store.redis_store import RedisStore
from cache_store.store_health import StoreHealth
from tests.redis_server import RedisServer

HASHES = block_hashes(root_hash("model", ""), range(320), 16)
RETENTION = Retention(ttl_seconds=600.0)
OpenStore = Callable[..., RedisStore]
StartRedis = Callable[..., RedisServer]


def status_of(publisher: BlockPublisher) -> EngineStatus:
    return EngineStatus(
        engine_id=publisher.engine_id, instance=publisher.instance, address="here", model_fingerprint="m"
    )


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


@pytest.fixture
async def open_store() -> AsyncIterator[OpenStore]:
    """Makes a client with a timeout that a busy machine keeps, or with the one given."""
    stores: list[RedisStore] = []

    def open_one(url: str, timeout_seconds: float = 20.0, retention: Retention = RETENTION) -> RedisStore:
        stores.append(RedisStore(url, retention=retention, timeout_seconds=timeout_seconds))
        return stores[-1]

    yield open_one
    for store in stores:
        await store.close()


async def ask_everything(store: RedisStore) -> list[BaseException | None]:
    """What each method raises."""
    status = EngineStatus(engine_id="a", instance="1", address="here", model_fingerprint="m")
    batch = BlockBatch(engine_id="a", instance="1", sequence=1, reset=True, stored=HASHES)
    questions = [
        store.announce(status),
        store.publish(batch),
        store.engines(),
        store.lookup(HASHES, ["a"]),
        store.record([PrefixUse(block_hash=HASHES[0], num_tokens=16)]),
        store.hot_prefixes(3),
        store.leave("a"),
    ]
    answers = await asyncio.gather(*questions, return_exceptions=True)
    return [answer if isinstance(answer, BaseException) else None for answer in answers]


async def test_a_dead_server_is_unavailable_to_every_method(start_redis: StartRedis, open_store: OpenStore) -> None:
    """Whatever is asked of a killed server raises StoreUnavailable, and is answered again once it is back."""
    server = start_redis()
    store = open_store(server.url)
    assert await ask_everything(store) == [None] * 7
    server.kill()
    assert {type(error) for error in await ask_everything(store)} == {StoreUnavailable}
    server.start()
    assert await ask_everything(store) == [None] * 7


async def test_a_hanging_server_costs_one_timeout(start_redis: StartRedis, open_store: OpenStore) -> None:
    """A stopped server raises StoreUnavailable after the timeout; late answers are not mistaken for new ones."""
    server = start_redis()
    store = open_store(server.url, timeout_seconds=0.2)
    assert await ask_everything(open_store(server.url)) == [None] * 7
    server.pause()
    async with asyncio.timeout(5.0):
        assert {str(error) for error in await ask_everything(store)} == {"no answer within 0.2 s"}
    server.resume()
    patient = open_store(server.url)
    await patient.publish(BlockBatch(engine_id="b", instance="1", sequence=1, reset=True, stored=HASHES))
    assert [await patient.lookup(HASHES[:n], ["b"]) for n in range(5)] == [{"b": n} for n in range(5)]


async def test_an_abandoned_question_does_not_answer_the_next(start_redis: StartRedis, open_store: OpenStore) -> None:
    """A caller that is cancelled while it waits leaves no answer behind on the connection."""
    server = start_redis()
    store = open_store(server.url)
    await store.publish(BlockBatch(engine_id="b", instance="1", sequence=1, reset=True, stored=HASHES))
    server.pause()
    abandoned = [asyncio.create_task(store.lookup(HASHES[:7], ["b"])) for _ in range(20)]
    await asyncio.sleep(0.1)
    for task in abandoned:
        task.cancel()
    await asyncio.gather(*abandoned, return_exceptions=True)
    server.resume()
    assert [await store.lookup(HASHES[:n], ["b"]) for n in range(5)] == [{"b": n} for n in range(5)]


@pytest.mark.parametrize("password", ["wrong", None])
async def test_a_wrong_password_is_unavailable(
    start_redis: StartRedis, open_store: OpenStore, password: str | None
) -> None:
    """A wrong or missing password is an outage whose reason is told, and the right one works."""
    server = start_redis(password="right")
    with pytest.raises(StoreUnavailable, match=r"(?i)auth|password"):
        await open_store(server.url_with(password)).engines()
    assert await open_store(server.url).engines() == []


@pytest.mark.parametrize("missing", ["SMISMEMBER", "EVALSHA", "HELLO"])
async def test_an_older_server_is_unavailable(start_redis: StartRedis, open_store: OpenStore, missing: str) -> None:
    """A server that lacks a command we need is an outage, not a crash."""
    server = start_redis("--rename-command", missing, "")
    with pytest.raises(StoreUnavailable):
        await open_store(server.url).lookup(HASHES, ["a"])


async def test_a_server_out_of_memory_is_unavailable(start_redis: StartRedis, open_store: OpenStore) -> None:
    """A server that takes no more data is an outage to who publishes."""
    server = start_redis("--maxmemory", "1", "--maxmemory-policy", "noeviction")
    with pytest.raises(StoreUnavailable, match="maxmemory"):
        await open_store(server.url).publish(
            BlockBatch(engine_id="a", instance="1", sequence=1, reset=True, stored=HASHES)
        )
    assert server.command("DBSIZE") == ":0"


async def test_a_server_that_takes_no_writes_is_of_no_use(start_redis: StartRedis, open_store: OpenStore) -> None:
    """With its memory full, or as a replica, it is an outage to what is asked at intervals; asking leaves nothing."""
    server = start_redis()
    store = open_store(server.url)
    assert await store.engines() == []
    assert server.command("DBSIZE") == ":0"
    server.command("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(StoreUnavailable, match="maxmemory"):
        await store.engines()
    server.command("CONFIG", "SET", "maxmemory", "0")
    assert await store.engines() == []
    server.command("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(StoreUnavailable, match=r"(?i)read.?only"):
        await store.engines()


async def test_unreadable_values_are_left_out_and_named(start_redis: StartRedis, open_store: OpenStore) -> None:
    """An announcement or a hot prefix that is none hides no other; it is logged once, and the store stays up."""
    server = start_redis()
    store = open_store(server.url, retention=Retention(ttl_seconds=600.0, max_hot_prefixes=4))
    health = StoreHealth()
    guarded = GuardedStore(store, health)
    await store.announce(EngineStatus(engine_id="b", instance="1", address="here", model_fingerprint="m"))
    await store.announce(EngineStatus(engine_id="a", instance="1", address="here", model_fingerprint="m"))
    await store.record([PrefixUse(block_hash=each, num_tokens=16, token_ids=range(16)) for each in HASHES[:2]])
    prefixes = await store.hot_prefixes(9)
    server.command("HSET", "{forerun}:engines", "a", "text")
    server.command("ZADD", "{forerun}:popular", "+inf", "not a prefix")
    key = prefixes[0].block_hash + struct.pack("<I", 16)
    await store._client.hset("{forerun}:hot", key, b"\xc1")
    with capture_logs() as logs:
        for _ in range(3):
            found = await guarded.engines()
            assert found is not None
            assert [status.engine_id for status in found] == ["b"]
            hot = await guarded.hot_prefixes(9)
            assert {prefix.block_hash for prefix in hot} == set(HASHES[:2])
            assert [prefix.token_ids is None for prefix in hot].count(True) == 1
    assert health.is_up
    reasons = sorted(entry["reason"] for entry in logs)
    assert [reason.split(":")[0] for reason in reasons] == [
        "a popular prefix of 12 bytes, not 20",
        "no EngineStatus",
        "no _Text",
    ]


async def test_blocks_of_another_type_are_replaced(start_redis: StartRedis, open_store: OpenStore) -> None:
    """A key of an engine's blocks that is no set counts as nothing held, for it alone; its publisher writes it anew."""
    server = start_redis()
    store = open_store(server.url)
    health = StoreHealth()
    publishers = [BlockPublisher(store, health, engine_id) for engine_id in ("a", "b")]
    for publisher in publishers:
        publisher.change(HASHES, [])
        await publisher.announce(status_of(publisher))
        await publisher.publish()
    server.command("DEL", "{forerun}:blocks:a", "{forerun}:sequence:a")
    server.command("SET", "{forerun}:blocks:a", "text")
    server.command("LPUSH", "{forerun}:sequence:a", "text")
    assert await store.lookup(HASHES, ["a", "b"]) == {"a": 0, "b": len(HASHES)}
    await publishers[0].announce(status_of(publishers[0]))
    await publishers[0].publish()
    assert await store.lookup(HASHES, ["a", "b"]) == {"a": len(HASHES), "b": len(HASHES)}


async def test_scripts_are_loaded_again_after_a_flush(start_redis: StartRedis, open_store: OpenStore) -> None:
    """A server that forgot its scripts is taught them without the caller noticing."""
    server = start_redis()
    store = open_store(server.url)
    assert await ask_everything(store) == [None] * 7
    server.flush()
    assert await ask_everything(store) == [None] * 7


async def test_a_set_that_was_evicted_is_noticed(start_redis: StartRedis, open_store: OpenStore) -> None:
    """If a server short of memory dropped an engine's blocks, a heartbeat tells so, and a batch too."""
    server = start_redis()
    store = open_store(server.url)
    await store.publish(BlockBatch(engine_id="a", instance="1", sequence=1, reset=True, stored=HASHES))
    server.command("DEL", "{forerun}:blocks:a")
    status = EngineStatus(engine_id="a", instance="1", address="here", model_fingerprint="m")
    assert await store.announce(status) is None
    assert not await store.publish(BlockBatch(engine_id="a", instance="1", sequence=2, stored=HASHES))


async def test_an_engine_that_holds_nothing_is_still_known(start_redis: StartRedis, open_store: OpenStore) -> None:
    """An empty set is not mistaken for one that was lost."""
    store = open_store(start_redis().url)
    await store.publish(BlockBatch(engine_id="a", instance="1", sequence=1, reset=True, stored=HASHES))
    assert await store.publish(BlockBatch(engine_id="a", instance="1", sequence=2, evicted=HASHES))
    assert await store.publish(BlockBatch(engine_id="a", instance="1", sequence=3, stored=HASHES[:1]))
    assert await store.lookup(HASHES, ["a"]) == {"a": 1}


async def test_a_lost_engine_is_removed_by_the_heartbeats_of_others(
    start_redis: StartRedis, open_store: OpenStore
) -> None:
    """What a dead engine last said does not stay for as long as others live."""
    server = start_redis()
    store = open_store(server.url)
    for engine_id in ("a", "b"):
        await store.announce(EngineStatus(engine_id=engine_id, instance="1", address="here", model_fingerprint="m"))
    server.command("ZADD", "{forerun}:heard", "1", "a")
    assert [each.engine_id for each in await store.engines()] == ["b"]
    await store.announce(EngineStatus(engine_id="b", instance="1", address="here", model_fingerprint="m"))
    assert server.command("HLEN", "{forerun}:engines") == ":1"
    assert server.command("ZCARD", "{forerun}:heard") == ":1"


async def test_every_key_expires_and_is_in_the_namespace(start_redis: StartRedis, open_store: OpenStore) -> None:
    """Nothing is left in Redis for ever, and a heartbeat gives all that an engine has its full time again."""
    server = start_redis()
    store = open_store(server.url, retention=Retention(ttl_seconds=600.0, max_hot_prefixes=4))
    status = EngineStatus(engine_id="a", instance="1", address="here", model_fingerprint="m")
    await store.announce(status)
    await store.publish(BlockBatch(engine_id="a", instance="1", sequence=1, reset=True, stored=HASHES))
    await store.record([PrefixUse(block_hash=HASHES[0], num_tokens=16, token_ids=range(16))])
    names = ["engines", "heard", "blocks:a", "sequence:a", "popular", "hot"]
    keys = [f"{{forerun}}:{name}" for name in names]
    assert server.command("DBSIZE") == f":{len(keys)}"
    assert all(int(server.command("PTTL", key)[1:]) > 0 for key in keys)
    for key in keys[:4]:
        server.command("PEXPIRE", key, "60000")
    await store.announce(status)
    assert all(int(server.command("PTTL", key)[1:]) > 60000 for key in keys[:4])


async def test_memory_per_cached_block_is_bounded(start_redis: StartRedis, open_store: OpenStore) -> None:
    """A block that an engine holds costs Redis at most the documented 100 bytes, and nothing once it is gone."""
    server = start_redis()
    store = open_store(server.url)
    await ask_everything(store)
    before = server.memory_used()
    many = block_hashes(root_hash("model", ""), range(320_000), 16)
    for first in range(0, len(many), 4000):
        batch = BlockBatch(
            engine_id="a",
            instance="1",
            sequence=first // 4000,
            reset=first == 0,
            stored=many[first : first + 4000],
        )
        assert await store.publish(batch)
    assert (server.memory_used() - before) / len(many) < 100
    await store.leave("a")
    while (server.memory_used() - before) / len(many) > 5:
        await asyncio.sleep(0.01)


async def test_a_look_up_is_one_round_trip(start_redis: StartRedis, open_store: OpenStore) -> None:
    """A prompt of 4,000 tokens over eight engines that hold different parts of it: one command from the client."""
    server = start_redis()
    store = open_store(server.url)
    hashes = block_hashes(root_hash("model", ""), range(4000), 16)
    held = {f"{number}": 31 * number for number in range(8)}
    for engine_id, number in held.items():
        batch = BlockBatch(engine_id=engine_id, instance="1", sequence=1, reset=True, stored=hashes[:number])
        assert await store.publish(batch)
    assert await store.lookup(hashes, list(held)) == held
    server.command("CONFIG", "RESETSTAT")
    assert await store.lookup(hashes, list(held)) == held
    lines = server.command("INFO", "commandstats").splitlines()
    inside = ("smismember", "config", "info", "ping")
    calls = {line.partition(":")[0].removeprefix("cmdstat_"): line for line in lines if line.startswith("cmdstat_")}
    asked = {name: line for name, line in calls.items() if not name.startswith(inside)}
    assert list(asked) == ["evalsha"]
    assert "calls=1," in asked["evalsha"]


async def test_a_popular_prefix_costs_a_bounded_amount(start_redis: StartRedis, open_store: OpenStore) -> None:
    """Each costs Redis at most 200 bytes, and each kept token 5."""
    server = start_redis()
    store = open_store(server.url, retention=Retention(max_hot_prefixes=100))
    await ask_everything(store)
    before = server.memory_used()
    many = block_hashes(root_hash("model", ""), range(16 * 4096), 16)
    await store.record([PrefixUse(block_hash=block_hash, num_tokens=16) for block_hash in many])
    assert (server.memory_used() - before) / len(many) < 200
    before = server.memory_used()
    await store.record(
        [PrefixUse(block_hash=each, num_tokens=16, token_ids=range(10**5, 10**5 + 1000)) for each in many[:100]]
    )
    assert (server.memory_used() - before) / (100 * 1000) < 5.5


async def test_an_outage_reaches_no_request_and_is_logged_once(start_redis: StartRedis, open_store: OpenStore) -> None:
    """Requests go on without answers, one warning is logged and one message that it is over."""
    server = start_redis()
    with capture_logs() as logs:
        health = StoreHealth(first_retry_seconds=0.01, longest_retry_seconds=0.01)
        guarded = GuardedStore(open_store(server.url), health)
        assert await guarded.lookup(HASHES, ["a"]) == {"a": 0}
        server.kill()
        for _ in range(5):
            assert await guarded.lookup(HASHES, ["a"]) is None
            assert await guarded.engines() is None
            assert await guarded.hot_prefixes(3) == []
            await guarded.record([PrefixUse(block_hash=HASHES[0], num_tokens=16)])
        server.start()
        while await guarded.engines() is None:
            await asyncio.sleep(0.01)
        assert await guarded.lookup(HASHES, ["a"]) == {"a": 0}
    assert [(entry["log_level"], entry["event"]) for entry in logs] == [
        ("warning", "metadata store is unavailable; serving without it"),
        ("info", "metadata store is back"),
    ]
    assert "reason" in logs[0]


async def test_a_store_known_to_be_down_is_not_asked_by_requests(
    start_redis: StartRedis, open_store: OpenStore
) -> None:
    """After one failure a hanging server is left alone: only the first request waited."""
    server = start_redis()
    health = StoreHealth(first_retry_seconds=600.0)
    guarded = GuardedStore(open_store(server.url, timeout_seconds=0.1), health)
    server.pause()
    assert [await guarded.lookup(HASHES, ["a"]) for _ in range(100)] == [None] * 100
    assert await guarded.engines() is None
    assert health.num_failures == 1


@pytest.mark.parametrize("trouble", ["kill", "flush", "pause", "expire", "evict", "fill"])
async def test_the_picture_is_true_again_after_an_outage(
    start_redis: StartRedis, open_store: OpenStore, trouble: str
) -> None:
    """What the engine stored and evicted before and during an outage is exactly what the store says afterwards."""
    server = start_redis()
    health = StoreHealth(first_retry_seconds=0.02, longest_retry_seconds=0.02)
    publisher = BlockPublisher(open_store(server.url, timeout_seconds=0.3), health, "a", max_batch=4)
    observer = open_store(server.url)
    running = asyncio.create_task(
        publisher.run(lambda: status_of(publisher), heartbeat_seconds=0.02, publish_seconds=0.01)
    )
    publisher.change(HASHES[:10], [])
    while await observer.lookup(HASHES, ["a"]) != {"a": 10}:
        await asyncio.sleep(0.01)
    if trouble == "kill":
        server.kill()
        await until(lambda: not health.is_up)
    elif trouble == "pause":
        server.pause()
        await until(lambda: not health.is_up)
    elif trouble == "fill":
        server.command("CONFIG", "SET", "maxmemory", "1")
        await until(lambda: not health.is_up)
    elif trouble == "flush":
        server.flush()
    elif trouble == "expire":
        server.command("DEL", "{forerun}:blocks:a", "{forerun}:sequence:a")
    else:
        server.command("DEL", "{forerun}:blocks:a")
    publisher.change(HASHES[10:15], HASHES[2:4])
    publisher.change(HASHES[2:3], HASHES[14:15])
    if trouble == "kill":
        server.start()
    elif trouble == "pause":
        server.resume()
    elif trouble == "fill":
        server.command("CONFIG", "SET", "maxmemory", "0")
    expected = {*HASHES[:3], *HASHES[4:14]}
    while {h for h in HASHES if await observer.lookup([h], ["a"]) == {"a": 1}} != expected:
        await asyncio.sleep(0.01)
    await until(lambda: health.is_up)
    while await observer.engines() != [status_of(publisher)]:
        await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
