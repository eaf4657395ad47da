"""Two fronts whose own engines have different models, in one namespace of one Redis."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial

import msgspec
import pytest
from structlog.testing import capture_logs

from service.pool.settings import PoolSettings
from service.settings import ServerSettings
from speculation.settings import EngineSettings
from tests.service.conftest import Service, StartService
from tests.service.pool.test_failover import TEXT

FINGERPRINTS = ["first", "second"]
PROMPT = list(range(3, 103))


@pytest.fixture
async def fronts(start_service: StartService, pool: PoolSettings, model_folder: object) -> list[Service]:
    """Two fronts with one engine each."""
    engine = msgspec.json.encode(EngineSettings(model=str(model_folder))).decode()
    command = [sys.executable, "-m", "tests.service.scripted_worker", "--settings", engine, "--fingerprint"]
    own = msgspec.structs.replace(pool, engines=1, warm_seconds=10.0)
    return [
        await start_service(pool=own, command=[*command, name], server=ServerSettings(model_name=name))
        for name in FINGERPRINTS
    ]


def is_restarted(front: Service, pid: int) -> bool:
    return front.front.is_ready and front.supervisor.pid != pid


async def test_each_serves_with_its_own_engine_and_names_the_other(fronts: list[Service]) -> None:
    """A restarted engine is warmed with what its own model was asked, not with the other's; both logs name it once."""
    with capture_logs() as logs:

        def strangers() -> list[tuple[str, str]]:
            found = [entry for entry in logs if entry["event"].startswith("engine of another model")]
            return sorted((entry["served"], entry["fingerprint"]) for entry in found)

        await fronts[0].until(lambda: len(strangers()) == 2)
        for front in fronts:
            for _ in range(3):
                assert (await front.post(TEXT, {"prompt": PROMPT, "max_tokens": 3}))[0] == 200
            await front.front.popularity.flush()
        for front, fingerprint in zip(fronts, FINGERPRINTS, strict=True):
            (member,) = front.front.client.members.values()
            assert member.ready is not None
            assert member.ready.model_fingerprint == fingerprint
            pid = front.supervisor.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await front.until(partial(is_restarted, front, pid))
        assert [entry["prefixes"] for entry in logs if entry["event"] == "warm start"] == [1, 1]
        assert len(await fronts[0].front.store.guarded.hot_prefixes(10)) == 2
        assert strangers() == [("first", "second"), ("second", "first")]


async def test_an_experiment_on_one_model_counts_no_request_of_the_other(fronts: list[Service]) -> None:
    """Experiments are shared in a namespace: one that filters by the model's name has that model's requests alone."""
    arms = [{"name": name, "speculation": {"method": name}} for name in ("none", "ngram")]
    definition = {"name": "a", "arms": arms, "filter": {"model": "first"}}
    status, answer = await fronts[0].post("/v1/experiments", definition)
    assert status in {200, 201}, answer
    for front in fronts:
        await front.front.experiments.refresh()
        for _ in range(4):
            assert (await front.post(TEXT, {"prompt": PROMPT, "max_tokens": 3}))[0] == 200
        await front.front.experiments._flush()
    report = await fronts[1].front.experiments.report("a")
    assert sum(arm.finished for arm in report.arms) == 4, report
