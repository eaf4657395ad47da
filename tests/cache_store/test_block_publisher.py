"""The publisher against a store that fails in every way a store may."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from cache_store.block_publisher import BlockPublisher
from cache_store.hashing import block_hashes, root_hash
from cache_store.memory_store import MemoryStore
from cache_store.metadata import BlockBatch, EngineStatus, StoreUnavailable
from cache_store.store_health import StoreHealth

HASHES = block_hashes(root_hash("model", ""), range(160), 16)


class UnsureStore(MemoryStore):
    """Fails as often as it is told to: before or after it has done what was asked."""

    def __init__(self) -> None:
        super().__init__(clock=lambda: 0.0)
        self.failures: list[str] = []
        self.batches: list[BlockBatch] = []

    async def announce(self, status: EngineStatus) -> int | None:
        failure = self._next_failure()
        known = await super().announce(status)
        self._fail(failure)
        return known

    async def publish(self, batch: BlockBatch) -> bool:
        failure = self._next_failure()
        self.batches.append(batch)
        applied = await super().publish(batch)
        self._fail(failure)
        return applied

    def _next_failure(self) -> str | None:
        failure = self.failures.pop(0) if self.failures else None
        if failure == "forget":
            self._blocks.clear()
        if failure == "before":
            raise StoreUnavailable("nothing was done")
        return failure

    @staticmethod
    def _fail(failure: str | None) -> None:
        if failure == "after":
            raise StoreUnavailable("it was done, but the answer was lost")


def status_of(publisher: BlockPublisher) -> EngineStatus:
    return EngineStatus(
        engine_id=publisher.engine_id, instance=publisher.instance, address="here", model_fingerprint="m"
    )


async def try_to_publish(publisher: BlockPublisher) -> None:
    try:
        await publisher.announce(status_of(publisher))
        await publisher.publish()
    except StoreUnavailable:
        pass


INDICES = st.lists(st.integers(0, 9), max_size=6)
FAILURES = st.lists(st.sampled_from([None, "before", "after", "forget"]), max_size=6)


@given(st.lists(st.tuples(INDICES, INDICES, FAILURES), max_size=12), st.integers(1, 4))
def test_the_store_ends_up_knowing_what_the_engine_holds(
    rounds: list[tuple[list[int], list[int], list[str]]], max_batch: int
) -> None:
    """After any changes, any failures and any loss of the store's memory, one undisturbed round makes it true again."""
    store = UnsureStore()
    publisher = BlockPublisher(store, StoreHealth(), "a", max_batch=max_batch)
    held: set[bytes] = set()

    async def play() -> dict[bytes, int]:
        for stored, evicted, failures in rounds:
            publisher.change([HASHES[i] for i in stored], [HASHES[i] for i in evicted])
            held.update(HASHES[i] for i in stored)
            held.difference_update(HASHES[i] for i in evicted)
            store.failures = list(failures)
            await try_to_publish(publisher)
        store.failures = []
        await publisher.announce(status_of(publisher))
        await publisher.publish()
        return {each: (await store.lookup([each], ["a"]))["a"] for each in HASHES}

    assert asyncio.run(play()) == {each: int(each in held) for each in HASHES}


async def test_nothing_is_sent_while_nothing_changes() -> None:
    """A change is sent once; one that was undone before it was sent, not at all."""
    store = UnsureStore()
    publisher = BlockPublisher(store, StoreHealth(), "a")
    publisher.change(HASHES[:3], [])
    await try_to_publish(publisher)
    await try_to_publish(publisher)
    publisher.change(HASHES[:3], [])
    publisher.change(HASHES[3:4], HASHES[3:4])
    publisher.change([], HASHES[:1])
    publisher.change(HASHES[:1], [])
    await try_to_publish(publisher)
    assert [(batch.reset, list(batch.stored)) for batch in store.batches] == [(True, HASHES[:3])]


async def test_a_lost_answer_does_not_cost_a_resynchronisation() -> None:
    """A batch whose answer was lost is sent again under its number, applied or not, and everything else stays."""
    for failure in ("before", "after"):
        store = UnsureStore()
        publisher = BlockPublisher(store, StoreHealth(), "a")
        publisher.change(HASHES[:3], [])
        await try_to_publish(publisher)
        publisher.change(HASHES[3:4], [])
        store.failures = ["", failure]
        await try_to_publish(publisher)
        await try_to_publish(publisher)
        assert [batch.reset for batch in store.batches][1:] == [False] * (1 if failure == "before" else 2)
        assert await store.lookup(HASHES, ["a"]) == {"a": 4}


async def test_a_gap_found_while_publishing_is_repaired_at_once() -> None:
    """A store that forgot the engine between two heartbeats knows everything again after the next batch."""
    store = UnsureStore()
    publisher = BlockPublisher(store, StoreHealth(), "a")
    publisher.change(HASHES[:3], [])
    await try_to_publish(publisher)
    store.failures = ["forget"]
    publisher.change(HASHES[3:4], [])
    await publisher.publish()
    assert await store.lookup(HASHES, ["a"]) == {"a": 4}


async def test_an_outage_of_any_length_costs_bounded_memory() -> None:
    """While nothing can be published, what is kept is at most what the engine held before and holds now."""
    store = UnsureStore()
    publisher = BlockPublisher(store, StoreHealth(), "a")
    publisher.change(HASHES, [])
    await try_to_publish(publisher)
    passing = block_hashes(root_hash("another model", ""), range(16_000), 16)
    publisher.change([], HASHES)
    for block_hash in passing:
        publisher.change([block_hash], [])
        publisher.change([], [block_hash])
    assert len(publisher._pending) == len(HASHES)
    assert len(publisher._held) == 0


async def test_a_large_pool_is_published_in_portions() -> None:
    """No batch is larger than the limit, and only the first of a resynchronisation resets."""
    store = UnsureStore()
    publisher = BlockPublisher(store, StoreHealth(), "a", max_batch=4)
    publisher.change(HASHES, [])
    await try_to_publish(publisher)
    assert [(batch.reset, len(batch.stored)) for batch in store.batches] == [(True, 4), (False, 4), (False, 2)]


async def test_the_loop_announces_and_publishes_until_it_is_cancelled() -> None:
    """Run beside an engine, it keeps the engine listed and its blocks known."""
    store = MemoryStore()
    publisher = BlockPublisher(store, StoreHealth(), "a")
    publisher.change(HASHES, [])
    running = asyncio.create_task(publisher.run(lambda: status_of(publisher), publish_seconds=0.001))
    while await store.lookup(HASHES, ["a"]) != {"a": len(HASHES)}:
        await asyncio.sleep(0.001)
    assert await store.engines() == [status_of(publisher)]
    running.cancel()
    assert isinstance((await asyncio.gather(running, return_exceptions=True))[0], asyncio.CancelledError)


async def test_the_loop_announces_itself_first_after_an_outage() -> None:
    """A store that comes back without its memory hears of the engine at once, however rare heartbeats are."""
    store = UnsureStore()
    health = StoreHealth(first_retry_seconds=0.001)
    publisher = BlockPublisher(store, health, "a")
    running = asyncio.create_task(
        publisher.run(lambda: status_of(publisher), heartbeat_seconds=600.0, publish_seconds=0.001)
    )
    while not store.batches:
        await asyncio.sleep(0.001)
    await store.leave("a")
    store.failures = ["before", "before"]
    publisher.change(HASHES, [])
    while await store.engines() != [status_of(publisher)]:
        await asyncio.sleep(0.001)
    while await store.lookup(HASHES, ["a"]) != {"a": len(HASHES)}:
        await asyncio.sleep(0.001)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
