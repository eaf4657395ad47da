"""Documents in the store that this version cannot read: left out, named, kept; everything else goes on."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from service.errors import ApiError
from service.experiments import evaluator as evaluators
from service.experiments import manager as managers
from service.experiments.redis_store import RedisExperimentStore
from service.experiments.store import MemoryExperimentStore
from service.pool.settings import PoolSettings
from speculation.messages import NgramConfig, NoSpeculation
from tests.redis_server import RedisServer
from tests.service.conftest import StartService
from tests.service.experiments.test_manager import Clock, drive, front, look
from tests.service.experiments.traffic import NGRAM, Law, body, definition, experiment, facts

pack = msgspec.msgpack.encode


def as_stored(name: str, **changes: Any) -> bytes:
    """An experiment as another version might have written it."""
    whole: dict[str, Any] = msgspec.to_builtins(experiment())
    whole["definition"] = {**whole["definition"], "name": name}
    return pack({**whole, **changes})


UNREADABLE = {
    "profile/bytes": b"\xc1\xff",
    "profile/text": b"not msgpack at all",
    "profile/list": pack([1, 2]),
    "profile/method": pack({"name": "method", "version": 1, "speculation": {"method": "psychic"}, "updated_at": 1.0}),
    "profile/other": pack({"name": "fast", "version": 1, "speculation": {"method": "none"}, "updated_at": 1.0}),
    "profile/deep": b"\x91" * 5000,
    "experiment/bytes": b"",
    "experiment/newer": as_stored(
        "newer", definition={**msgspec.to_builtins(definition()), "name": "newer", "colour": "red"}
    ),
    "experiment/weights": as_stored("weights", weights=[1.0]),
    "experiment/shares": as_stored("shares", weights=[float("nan"), 0.5]),
}


async def test_unreadable_documents_hide_no_other() -> None:
    """For each kind of damage, what can be read is used, what cannot is named with a reason, once in the log."""
    store = MemoryExperimentStore()
    experiments = front(store)
    await experiments.put_profile("fast", NgramConfig(), is_default=True)
    await experiments.create(definition())
    await store.write(await store.revision(), UNREADABLE)
    with capture_logs() as logs:
        for _ in range(3):
            await look(experiments)
            book = await experiments.refresh()
    assert book.unreadable.keys() == UNREADABLE.keys()
    assert all(book.unreadable.values())
    assert (set(book.profiles), set(book.experiments), book.default) == ({"fast"}, {"lookup"}, "fast")
    assert sorted(entry["document"] for entry in logs) == sorted(UNREADABLE)
    assert any(experiments.assign(facts(number)) for number in range(50))
    await store.write(await store.revision(), {"profile/bytes": b"\xc1"})
    with capture_logs() as logs:
        await look(experiments)
    assert [entry["document"] for entry in logs] == ["profile/bytes"]


async def test_an_unreadable_document_is_removed_by_name_and_never_overwritten() -> None:
    """Whoever changes or reads exactly that name is told why not; a change elsewhere keeps it; a DELETE removes it."""
    store = MemoryExperimentStore()
    experiments = front(store)
    await experiments.put_profile("fast", NgramConfig())
    await store.write(1, UNREADABLE)
    for attempt in (
        experiments.put_profile("text", NoSpeculation()),
        experiments.create(msgspec.structs.replace(definition(), name="newer")),
        experiments.report("newer"),
        experiments.stop("newer"),
    ):
        with pytest.raises(ApiError, match="this version of forerun cannot read it") as caught:
            await attempt
        assert (caught.value.status, caught.value.body.code) == (409, "unreadable_document")
    await experiments.put_profile("slow", NoSpeculation())
    initial = front(store, initial_profiles={"bytes": NoSpeculation(), "new": NoSpeculation()})
    await look(initial)
    assert set(initial.book.profiles) == {"fast", "slow", "new"}
    documents = (await store.read()).documents
    assert {name: documents[name] for name in UNREADABLE} == UNREADABLE
    await experiments.delete_profile("text")
    await experiments.delete("newer")
    assert (await store.read()).documents.keys() & {"profile/text", "experiment/newer"} == set()
    await experiments.put_profile("text", NoSpeculation())


async def test_fields_of_a_newer_version_survive_a_change() -> None:
    """A document with fields that this version does not know is read, and a change of it keeps them."""
    store = MemoryExperimentStore()
    experiments = front(store)
    await experiments.put_profile("fast", NgramConfig())
    await experiments.create(definition())
    written = (await store.read()).documents
    newer = {name: pack({**msgspec.msgpack.decode(document), "colour": "red"}) for name, document in written.items()}
    await store.write(await store.revision(), newer)
    await experiments.put_profile("fast", NoSpeculation())
    await experiments.stop("lookup")
    assert (experiments.book.profiles["fast"].version, experiments.book.experiments["lookup"].status) == (2, "stopped")
    found = {name: msgspec.msgpack.decode(document) for name, document in (await store.read()).documents.items()}
    assert {name: each["colour"] for name, each in found.items()} == {"profile/fast": "red", "experiment/lookup": "red"}
    assert found["profile/fast"]["speculation"] == {"method": "none"}


async def test_an_unreadable_tally_or_trace_concerns_its_experiment_alone(shared_redis: RedisServer) -> None:
    """What cannot be added or evaluated is logged once; its report is 503; another experiment ends on time."""
    store = RedisExperimentStore(shared_redis.url, namespace=uuid.uuid4().hex)
    clock = Clock()
    experiments = front(store, clock)
    first = definition(name="broken", filter={"route": "/v1/completions"})
    await experiments.create(first)
    await experiments.create(definition(filter={"route": "/v1/chat/completions"}))
    broken = experiments.book.experiments["broken"]
    shared_redis.command("SET", store._key(f"tally:{broken.tally_key}"), "text")
    shared_redis.command("SET", store._key(f"trace:{experiments.book.experiments['lookup'].tally_key}"), "text")
    experiments._ledger.tally(broken.tally_key).add("c.considered", 1.0)
    with capture_logs() as logs:
        drive(experiments, Law(1, (1.0, 0.7)), 1000)
        for _ in range(3):
            await look(experiments)
            experiments._ledger.tally(broken.tally_key).add("c.considered", 1.0)
    assert experiments.book.experiments["lookup"].status == "stopped"
    events = [entry["event"] for entry in logs if entry["log_level"] == "error"]
    assert events.count("experiment tally unreadable") == 1
    assert events.count("experiment not evaluated") == 2
    for question in (experiments.report("broken"), experiments.trace("lookup")):
        with pytest.raises(ApiError) as caught:
            await question
        assert caught.value.status == 503
    assert (await experiments.report("lookup")).num_samples == 1000
    await store.close()


async def test_an_experiment_that_cannot_be_served_ends_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """An assignment or a count that raises leaves the request without experiment, and is logged once."""
    experiments = front(MemoryExperimentStore())
    await experiments.create(definition())
    assigned = next(found for number in range(50) if (found := experiments.assign(facts(number))) is not None)

    def fail(*_: object) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(managers, "place", fail)
    monkeypatch.setattr(managers, "record", fail)
    with capture_logs() as logs:
        assert [experiments.assign(facts(number)) for number in range(3)] == [None] * 3
        experiments.observe(assigned, Law(1).outcome(facts(), 0))
    assert [(entry["event"], entry["experiment"]) for entry in logs] == [("experiment broken", "lookup")]


async def test_the_exchange_survives_whatever_it_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of a store that are no outage are logged; the first and last exchange, and all between, go on."""
    monkeypatch.setattr(managers, "FLUSH_SECONDS", 0.01)
    store = MemoryExperimentStore()
    experiments = front(store)
    revision, failures = store.revision, [RuntimeError("a mistake")] * 3

    async def fail_at_first() -> int:
        if failures:
            raise failures.pop()
        return await revision()

    monkeypatch.setattr(store, "revision", fail_at_first)
    async with asyncio.timeout(20), experiments.running():
        await front(store).put_profile("fast", NgramConfig())
        while "fast" not in experiments.book.profiles:
            await asyncio.sleep(0.01)


async def test_a_service_answers_beside_an_unreadable_document(
    start_service: StartService, start_redis: Callable[..., RedisServer]
) -> None:
    """Over HTTP and a real Redis: lists name it, its own name is 409, others work, and the exchange goes on."""
    redis = start_redis()
    service = await start_service(pool=PoolSettings(store=redis.url, store_timeout=2.0))

    async def call(method: str, path: str, json: Any = None) -> tuple[int, Any]:
        async with service.client.request(method, f"{service.url}{path}", json=json) as response:
            return response.status, await response.json() if response.status != 204 else None

    prefix = "{forerun}:experiments:"
    redis.command("HSET", f"{prefix}documents", "profile/bad", "not msgpack at all")
    redis.command("HSET", f"{prefix}documents", "experiment/bad", "neither")
    redis.command("INCR", f"{prefix}revision")
    config = {"speculation": NGRAM["speculation"]}
    status, listed = await call("GET", "/v1/speculation")
    assert (status, set(listed["unreadable"])) == (200, {"profile/bad", "experiment/bad"})
    assert set((await call("GET", "/v1/experiments"))[1]["unreadable"]) == {"profile/bad", "experiment/bad"}
    assert (await call("PUT", "/v1/speculation/good", config))[0] == 200
    assert (await call("POST", "/v1/experiments", body()))[0] == 201
    for method, path, sent in (
        ("GET", "/v1/speculation/bad", None),
        ("PUT", "/v1/speculation/bad", config),
        ("GET", "/v1/experiments/bad", None),
        ("POST", "/v1/experiments", body(name="bad")),
    ):
        status, answer = await call(method, path, sent)
        assert (status, answer["error"]["code"]) == (409, "unreadable_document")
    assert (await call("GET", "/v1/experiments/lookup"))[0] == 200
    assert (await call("DELETE", "/v1/speculation/bad"))[0] == 204
    assert (await call("DELETE", "/v1/experiments/bad"))[0] == 204
    assert "unreadable" not in (await call("GET", "/v1/speculation"))[1]
    await call("PUT", "/v1/speculation/good", {**config, "default": True})
    other = RedisExperimentStore(redis.url)
    try:
        await front(other).put_profile("elsewhere", NoSpeculation())
        await service.until(lambda: "elsewhere" in service.front.experiments.book.profiles)
    finally:
        await other.close()


async def test_one_conclusion_that_is_refused_does_not_hold_up_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """An experiment whose conclusion meets a conflict is postponed; the one behind it ends at the same look."""
    experiments = front(MemoryExperimentStore())
    for name, route in (("first", "/v1/completions"), ("second", "/v1/chat/completions")):
        await experiments.create(definition(name=name, filter={"route": route}))
    ending = evaluators.Evaluator._look_at

    async def refuse_first(self: evaluators.Evaluator, one: Any) -> None:
        if one.name == "first":
            raise ApiError(409, "somebody else was quicker")
        await ending(self, one)

    monkeypatch.setattr(evaluators.Evaluator, "_look_at", refuse_first)
    drive(experiments, Law(1, (1.0, 0.7)), 1000)
    await look(experiments)
    assert {name: one.status for name, one in experiments.book.experiments.items()} == {
        "first": "running",
        "second": "stopped",
    }
