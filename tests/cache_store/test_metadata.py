"""What every metadata store does, in memory and in a real Redis alike."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_store.hashing import block_hashes, root_hash
from cache_store.memory_store import MemoryStore
from cache_store.metadata import BlockBatch, EngineStatus, MetadataStore, PrefixUse, Retention
from cache_store.redis_store import RedisStore
from tests.redis_server import RedisServer

HASHES = block_hashes(root_hash("model", ""), range(400), 16)


def status(
    engine_id: str = "a", instance: str = "1", *, num_waiting: int = 0, num_running: int = 0, blocks_free: int = 0
) -> EngineStatus:
    return EngineStatus(
        engine_id=engine_id,
        instance=instance,
        address="tcp://127.0.0.1:1",
        model_fingerprint="m",
        num_waiting=num_waiting,
        num_running=num_running,
        blocks_free=blocks_free,
    )


def batch(
    sequence: int,
    stored: list[bytes] | None = None,
    evicted: list[bytes] | None = None,
    *,
    engine_id: str = "a",
    instance: str = "1",
    reset: bool = False,
) -> BlockBatch:
    return BlockBatch(
        engine_id=engine_id,
        instance=instance,
        sequence=sequence,
        reset=reset,
        stored=stored or [],
        evicted=evicted or [],
    )


def use(index: int, num_tokens: int = 16, *, token_ids: Sequence[int] = (), cache_salt: str = "") -> PrefixUse:
    return PrefixUse(block_hash=HASHES[index], num_tokens=num_tokens, token_ids=token_ids, cache_salt=cache_salt)


async def eventually_none_left(store: MetadataStore) -> None:
    while await store.engines() or await store.lookup(HASHES, ["a"]) != {"a": 0}:
        await asyncio.sleep(0.02)


async def test_a_prefix_is_found_as_far_as_each_engine_holds_it(store: MetadataStore) -> None:
    """One look-up tells for every engine the number of leading blocks it holds, however many there are."""
    await store.publish(batch(1, HASHES, engine_id="all", reset=True))
    await store.publish(batch(1, HASHES[:9], engine_id="some", reset=True))
    await store.publish(batch(1, HASHES[:3] + HASHES[4:], engine_id="holed", reset=True))
    await store.publish(batch(1, [], engine_id="none", reset=True))
    engines = ["all", "some", "holed", "none", "unheard of"]
    assert await store.lookup(HASHES, engines) == {"all": 25, "some": 9, "holed": 3, "none": 0, "unheard of": 0}
    assert await store.lookup([], ["all"]) == {"all": 0}
    assert await store.lookup(HASHES, []) == {}


async def test_blocks_of_another_salt_are_not_found(store: MetadataStore) -> None:
    """A tenant's prompt finds nothing that the same prompt of another tenant left behind."""
    tenant, other = (block_hashes(root_hash("model", salt), range(400), 16) for salt in ("x", "y"))
    await store.publish(batch(1, tenant, reset=True))
    assert await store.lookup(other, ["a"]) == {"a": 0}
    assert await store.lookup(tenant, ["a"]) == {"a": 25}


async def test_evicted_blocks_are_gone(store: MetadataStore) -> None:
    """A batch removes what it evicts and adds what it stores."""
    await store.publish(batch(1, HASHES[:5], reset=True))
    assert await store.publish(batch(2, HASHES[5:6], HASHES[3:4]))
    assert await store.lookup(HASHES, ["a"]) == {"a": 3}
    assert await store.publish(batch(3, HASHES[3:4]))
    assert await store.lookup(HASHES, ["a"]) == {"a": 6}


async def test_a_batch_sent_twice_is_applied_once(store: MetadataStore) -> None:
    """A batch whose answer was lost may be sent again: it succeeds, and a later change is not undone."""
    await store.publish(batch(1, HASHES[:2], reset=True))
    assert await store.publish(batch(2, HASHES[2:3]))
    assert await store.publish(batch(2, HASHES[2:3]))
    assert await store.publish(batch(3, [], HASHES[2:3]))
    assert await store.lookup(HASHES, ["a"]) == {"a": 2}


@pytest.mark.parametrize("sequence", [1, 4, 9])
async def test_a_gap_is_refused_and_changes_nothing(store: MetadataStore, sequence: int) -> None:
    """A batch that does not follow the last one is refused whole, be it too old or too new."""
    await store.publish(batch(1, HASHES[:2], reset=True))
    await store.publish(batch(2, HASHES[2:3]))
    assert not await store.publish(batch(sequence, HASHES[3:], HASHES[:1]))
    assert await store.lookup(HASHES, ["a"]) == {"a": 3}
    assert await store.announce(status()) == 2


async def test_nothing_can_be_published_before_a_reset(store: MetadataStore) -> None:
    """An engine the store does not know must say everything first, whatever number it begins with."""
    assert not await store.publish(batch(1, HASHES))
    assert not await store.publish(batch(0, HASHES))
    assert await store.lookup(HASHES, ["a"]) == {"a": 0}


async def test_a_reset_replaces_what_was_known(store: MetadataStore) -> None:
    """After a reset the engine holds what it said since, and batches go on from the reset's number."""
    await store.publish(batch(1, HASHES, reset=True))
    assert await store.publish(batch(7, HASHES[:4], reset=True))
    assert await store.lookup(HASHES, ["a"]) == {"a": 4}
    assert await store.publish(batch(8, HASHES[4:5]))
    assert await store.lookup(HASHES, ["a"]) == {"a": 5}


async def test_a_restarted_engine_cannot_build_on_its_old_blocks(store: MetadataStore) -> None:
    """Another instance under the same id is told that its blocks are unknown, and must reset."""
    await store.publish(batch(1, HASHES, reset=True))
    assert await store.announce(status(instance="2")) is None
    assert not await store.publish(batch(2, HASHES, instance="2"))
    assert await store.publish(batch(1, HASHES[:1], instance="2", reset=True))
    assert await store.announce(status(instance="2")) == 1
    assert await store.lookup(HASHES, ["a"]) == {"a": 1}


async def test_an_instance_is_not_taken_for_one_whose_name_it_begins(store: MetadataStore) -> None:
    """Instances are compared whole."""
    await store.publish(batch(1, HASHES, instance="10", reset=True))
    assert await store.announce(status(instance="1")) is None


async def test_engines_are_listed_with_their_last_words(store: MetadataStore) -> None:
    """Every announced engine is listed in order of ids with all it said last, whoever asks."""
    assert await store.engines() == []
    await store.announce(status("b", num_waiting=1))
    await store.announce(status("a", num_running=3))
    said = status("b", num_waiting=2, blocks_free=5)
    await store.announce(said)
    assert await store.engines() == [status("a", num_running=3), said]


async def test_an_engine_that_leaves_is_forgotten_at_once(store: MetadataStore) -> None:
    """Its status and its blocks are gone, others stay, and leaving twice is harmless."""
    for engine_id in ("a", "b"):
        await store.announce(status(engine_id))
        await store.publish(batch(1, HASHES, engine_id=engine_id, reset=True))
    await store.leave("a")
    await store.leave("a")
    assert await store.engines() == [status("b")]
    assert await store.lookup(HASHES, ["a", "b"]) == {"a": 0, "b": 25}
    assert not await store.publish(batch(2, HASHES))


async def test_a_silent_engine_is_gone_with_its_blocks(open_store: Callable[[Retention], MetadataStore]) -> None:
    """Without a heartbeat for its time to live, an engine is no longer listed and no longer found to hold anything."""
    store = open_store(Retention(ttl_seconds=0.05))
    await store.announce(status())
    await store.publish(batch(1, HASHES, reset=True))
    await eventually_none_left(store)
    assert await store.announce(status()) is None


async def test_heartbeats_keep_an_engine_and_its_blocks() -> None:
    """An engine that announces itself in time holds its blocks for as long as it does, and no longer."""
    now = 0.0
    store = MemoryStore(Retention(ttl_seconds=5.0), clock=lambda: now)
    await store.publish(batch(1, HASHES, reset=True))
    for _ in range(10):
        assert await store.announce(status()) == 1
        now += 4.0
    assert await store.lookup(HASHES, ["a"]) == {"a": 25}
    now += 1.0
    assert await store.lookup(HASHES, ["a"]) == {"a": 0}
    assert await store.engines() == []


async def test_prefixes_are_ranked_by_use(store: MetadataStore) -> None:
    """The most used prefix comes first, with its length and about as many uses as there were."""
    await store.record([use(0, 16), use(1, 32), use(1, 32)])
    await store.record([use(1, 32), use(2, 48), use(2, 48)])
    hot = await store.hot_prefixes(2)
    assert [(each.block_hash, each.num_tokens) for each in hot] == [(HASHES[1], 32), (HASHES[2], 48)]
    assert [each.uses for each in hot] == pytest.approx([3, 2], rel=0.05)
    assert len(await store.hot_prefixes(10)) == 3
    assert all(each.token_ids is None for each in hot)


async def test_old_uses_count_less(open_store: Callable[[Retention], MetadataStore]) -> None:
    """After many half-lives one new use outweighs five old ones, and in the end the old ones are forgotten."""
    store = open_store(Retention(half_life_seconds=0.05))
    await store.record([use(0)] * 5)
    while (hot := await store.hot_prefixes(1)) and hot[0].uses > 0.5:
        await asyncio.sleep(0.01)
    await store.record([use(1)])
    assert (await store.hot_prefixes(2))[0].block_hash == HASHES[1]
    while await store.hot_prefixes(2):
        await asyncio.sleep(0.05)


async def test_the_number_of_prefixes_is_bounded(open_store: Callable[[Retention], MetadataStore]) -> None:
    """Above the bound the least used are forgotten."""
    store = open_store(Retention(max_popular_prefixes=3, half_life_seconds=3600))
    await store.record([use(0)] * 3 + [use(1)] * 2 + [use(2)] * 4)
    await store.record([use(index) for index in range(3, 20)])
    hot = await store.hot_prefixes(100)
    assert len(hot) == 3
    assert [each.block_hash for each in hot][:2] == [HASHES[2], HASHES[0]]


async def test_token_ids_are_kept_for_the_hottest_alone(store: MetadataStore) -> None:
    """Of prefixes that came with their token ids, the four most used keep them, and the salt."""
    for index in range(8):
        await store.record([use(index, token_ids=range(16), cache_salt=f"salt {index}")] * (index + 1))
    hot = await store.hot_prefixes(8)
    assert [each.cache_salt for each in hot] == ["salt 7", "salt 6", "salt 5", "salt 4", "", "", "", ""]
    assert [each.token_ids for each in hot] == [tuple(range(16))] * 4 + [None] * 4


async def test_a_prefix_that_is_too_long_is_counted_without_its_text(store: MetadataStore) -> None:
    """Its uses are known, its token ids are not."""
    await store.record([use(0, 80, token_ids=range(80))])
    (hot,) = await store.hot_prefixes(1)
    assert (hot.num_tokens, hot.token_ids) == (80, None)


async def test_no_text_is_kept_unless_asked_for(open_store: Callable[[Retention], MetadataStore]) -> None:
    """By default token ids of requests are stored nowhere, even if a caller hands them over."""
    store = open_store(Retention())
    await store.record([use(0, token_ids=range(16), cache_salt="secret")])
    (hot,) = await store.hot_prefixes(1)
    assert (hot.token_ids, hot.cache_salt) == (None, "")


async def test_many_callers_at_once_get_their_own_answers(store: MetadataStore) -> None:
    """Two hundred look-ups together, more than there are connections, each answer what was asked."""
    await store.publish(batch(1, HASHES, reset=True))
    found = await asyncio.gather(*(store.lookup(HASHES[: i % 26], ["a"]) for i in range(200)))
    assert [each["a"] for each in found] == [i % 26 for i in range(200)]


INDICES = st.lists(st.integers(0, 7), max_size=6, unique=True)
CALLS = st.lists(
    st.one_of(
        st.tuples(
            st.just("publish"),
            st.sampled_from("ab"),
            st.sampled_from("12"),
            st.integers(1, 4),
            st.booleans(),
            INDICES,
            INDICES,
        ),
        st.tuples(st.just("announce"), st.sampled_from("ab"), st.sampled_from("12")),
        st.tuples(st.just("leave"), st.sampled_from("ab")),
    ),
    max_size=20,
)


async def answers(store: MetadataStore, calls: list[tuple[object, ...]]) -> list[object]:
    """What a store says to a series of calls, and after each of them about what it knows."""
    said: list[object] = []
    for name, *arguments in calls:
        match name, arguments:
            case "publish", [str(engine_id), str(instance), int(sequence), bool(reset), list(stored), list(evicted)]:
                stored_hashes = [HASHES[i] for i in stored if i not in evicted]
                evicted_hashes = [HASHES[i] for i in evicted]
                change = batch(
                    sequence, stored_hashes, evicted_hashes, engine_id=engine_id, instance=instance, reset=reset
                )
                said.append(await store.publish(change))
            case "announce", [str(engine_id), str(instance)]:
                said.append(await store.announce(status(engine_id, instance)))
            case "leave", [str(engine_id)]:
                await store.leave(engine_id)
        said.append(await store.engines())
        said += [await store.lookup(HASHES[start:8], ["a", "b"]) for start in range(8)]
    return said


@settings(max_examples=60)
@given(CALLS)
def test_redis_answers_as_memory_does(shared_redis: RedisServer, calls: list[tuple[object, ...]]) -> None:
    """Any series of calls by two engines, in two instances each, has the same answers from both stores."""
    retention = Retention(ttl_seconds=600.0)

    async def ask_redis() -> list[object]:
        store = RedisStore(shared_redis.url, namespace=secrets.token_hex(8), retention=retention, timeout_seconds=20)
        try:
            return await answers(store, calls)
        finally:
            await store.close()

    assert asyncio.run(ask_redis()) == asyncio.run(answers(MemoryStore(retention), calls))
