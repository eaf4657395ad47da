from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable

import pytest

from cache_store.metadata import StoreUnavailable
from service.experiments.redis_store import RedisExperimentStore
from service.experiments.statistics.units import MAX_UNITS
from service.experiments.store import ExperimentStore, MemoryExperimentStore, Snapshot
from service.experiments.tally import Tally
from service.experiments.verdict import report_on
from tests.redis_server import RedisServer
from tests.service.experiments.traffic import Law, experiment, observe


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[ExperimentStore]:
    if request.param == "memory":
        yield MemoryExperimentStore()
        return
    server: RedisServer = request.getfixturevalue("shared_redis")
    found = RedisExperimentStore(server.url, namespace=uuid.uuid4().hex)
    yield found
    await found.close()


async def test_documents_change_together_and_only_from_what_was_read(store: ExperimentStore) -> None:
    """A write takes effect whole if nothing changed since it was worked out, else not at all."""
    assert await store.read() == Snapshot(0, {})
    assert await store.write(0, {"a": b"1", "b": b"\x00\xff"})
    assert await store.revision() == 1
    assert await store.read() == Snapshot(1, {"a": b"1", "b": b"\x00\xff"})
    assert not await store.write(0, {"a": b"2"})
    assert await store.write(1, {"a": None, "c": b"3"})
    assert await store.read() == Snapshot(2, {"b": b"\x00\xff", "c": b"3"})


async def test_of_many_writers_one_wins(store: ExperimentStore) -> None:
    """Twenty writes from the same revision: exactly one is taken."""
    taken = await asyncio.gather(*(store.write(0, {"winner": str(n).encode()}) for n in range(20)))
    assert sum(taken) == 1
    assert (await store.read()).documents == {"winner": str(taken.index(True)).encode()}


async def test_fronts_add_up(store: ExperimentStore) -> None:
    """What two fronts saw, in many pieces and at once, is what one would have seen."""
    chosen = experiment(unit="user")
    pieces = [observe(chosen, Law(seed), 40) for seed in range(10)]
    whole = Tally()
    for piece in pieces:
        whole = whole.merged(piece)
    await asyncio.gather(*(store.add("key", f"front-{n % 2}-{n}", 1, piece) for n, piece in enumerate(pieces)))
    found = await store.tally("key")
    assert found.units == whole.units
    assert found.sums == pytest.approx(whole.sums)
    assert report_on(chosen, found).verdict == report_on(chosen, whole).verdict


async def test_a_repeated_batch_counts_once(store: ExperimentStore) -> None:
    """A front that got no answer sends again; its number says that it was counted. Fronts number for themselves."""
    for front, number in (("a", 1), ("a", 1), ("b", 1), ("a", 2), ("a", 1)):
        await store.add("key", front, number, Tally(sums={"n": 1.0}))
    assert (await store.tally("key")).sums == {"n": 3.0}


async def test_the_sample_of_units_is_cut(store: ExperimentStore) -> None:
    """However many units come, the smallest hashes stay, with their arms."""
    for part in range(3):
        units = {unit: unit % 2 for unit in range(part, 3 * 3000, 3)}
        await store.add("key", "a", part + 1, Tally(units=units))
    assert (await store.tally("key")).units == {unit: unit % 2 for unit in range(MAX_UNITS)}


async def test_keys_do_not_mix_and_can_be_forgotten(store: ExperimentStore) -> None:
    """Each key has its own tally and trace; forgetting one leaves the other."""
    for key in ("one", "two"):
        await store.add(key, "a", 1, Tally(sums={key: 1.0}))
        await store.save_trace(key, key.encode())
    await store.forget("one")
    assert (await store.tally("one"), await store.trace("one")) == (Tally(), None)
    assert ((await store.tally("two")).sums, await store.trace("two")) == ({"two": 1.0}, b"two")


async def test_one_front_leads_until_it_falls_silent(store: ExperimentStore) -> None:
    """The leader stays so while it asks; another takes over when it has not asked for the time it said."""
    assert await store.lead("a", 0.3)
    assert not await store.lead("b", 0.3)
    assert await store.lead("a", 0.05)
    await asyncio.sleep(0.1)
    assert await store.lead("b", 0.3)
    assert not await store.lead("a", 0.3)


async def test_a_redis_that_is_away_says_so(start_redis: Callable[..., RedisServer]) -> None:
    """Operations on a dead or silent server end in `StoreUnavailable` within their timeout, and work afterwards."""
    server = start_redis()
    store = RedisExperimentStore(server.url, timeout_seconds=0.3)
    await store.add("key", "a", 1, Tally(sums={"n": 1.0}))
    server.pause()
    with pytest.raises(StoreUnavailable):
        await store.read()
    server.resume()
    assert (await store.tally("key")).sums == {"n": 1.0}
    server.kill()
    for attempt in (store.revision, store.read, lambda: store.lead("a", 1.0), lambda: store.tally("key")):
        with pytest.raises(StoreUnavailable):
            await attempt()
    server.start()
    assert await store.revision() == 0
    await store.close()


@pytest.mark.parametrize("namespace", ["", "a b", "x{y}", "new\nline"])
def test_a_namespace_is_checked(namespace: str) -> None:
    """Only letters, digits and a few signs make a namespace."""
    with pytest.raises(ValueError, match="namespace"):
        RedisExperimentStore("redis://127.0.0.1:1", namespace=namespace)
