"""Engines that Ray places: on a real local cluster of several nodes, one of which dies in mid-stream."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from service.pool.ray_engines import RayEngines
from service.pool.settings import PoolSettings
from service.settings import Settings
from speculation.settings import EngineSettings
from tests.redis_server import RedisServer
from tests.service.conftest import Service, StartService
from tests.service.pool.standalone import SECRET
from tests.service.pool.test_failover import ask, body, children

ROOT = Path(__file__).resolve().parent.parent.parent.parent
NODES = 3
POOL = PoolSettings(ray="auto", store="redis://127.0.0.1:1/0", secret=SECRET)


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"store": "memory"}, "ray needs a store"), ({"secret": None}, "ray needs secret")],
)
def test_engines_elsewhere_must_be_found_and_trusted(changes: dict[str, Any], says: str) -> None:
    """Without a store, or without a secret or certificates, the setting that is missing is named."""
    with pytest.raises(ValueError, match=says):
        RayEngines(Settings(pool=msgspec.structs.replace(POOL, **changes)))


def test_ray_chooses_the_devices() -> None:
    """Several engines cannot all have the one device that was named."""
    with pytest.raises(ValueError, match="device is 'cuda:1', but Ray chooses the device"):
        RayEngines(Settings(pool=POOL, engine=EngineSettings(model="x", device="cuda:1")))


async def test_without_ray_it_is_told_where_it_comes_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where the extra is not installed the reason names it, and no process is left."""
    (tmp_path / "ray.py").write_text("raise ImportError\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT), *sys.path]))
    before = children()
    with pytest.raises(ValueError, match=r"ray is not installed; .* pip install 'forerun\[ray\]'"):
        await RayEngines(Settings(pool=POOL)).run()
    assert children() == before


async def test_a_cluster_that_does_not_answer_is_given_up() -> None:
    """Ray itself would try for many minutes: after the time it has, the reason names the setting; nothing is left."""
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    before = children()
    pool = msgspec.structs.replace(POOL, ray="127.0.0.1:1")
    with pytest.raises(ValueError, match=r"ray is '127.0.0.1:1', and no cluster answered there within 3 s"):
        await RayEngines(Settings(pool=pool), connect_seconds=3.0).run()
    assert children() == before


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head that takes no engines, and three nodes with room for one engine each."""
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    # A short name: sockets lie in there.
    folder = tempfile.mkdtemp(prefix="ray-")
    before = dict(os.environ)
    # Ray writes nowhere else, and tells nobody. `temp_dir` alone does not do: `Cluster` leaves its address in `ray` in
    # Ray's temporary folder, which only this variable moves.
    os.environ["RAY_TMPDIR"] = folder
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Nodes find the project where this test does.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False, "temp_dir": str(Path(folder, "ray"))}
    made = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(NODES):
        made.add_node(num_cpus=1)
    made.wait_for_nodes()
    yield made
    made.shutdown()
    os.environ.clear()
    os.environ.update(before)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def pool(cluster: Any, shared_redis: RedisServer) -> PoolSettings:
    return PoolSettings(
        engines=2,
        ray=cluster.address,
        store=shared_redis.url,
        namespace=secrets.token_hex(8),
        store_timeout=2.0,
        silence_seconds=3.0,
        secret=SECRET,
    )


async def until_serving(service: Service, num_engines: int = 2) -> set[str]:
    """Wait until so many engines serve; their ids."""
    async with asyncio.timeout(200):
        while len(service.front.client.serving) != num_engines:
            await asyncio.sleep(0.1)
    return {member.engine_id for member in service.front.client.serving}


async def until_gone(pids: list[int]) -> None:
    """Wait until none of these processes is left."""
    async with asyncio.timeout(60):
        while any(runs(pid) for pid in pids):
            await asyncio.sleep(0.1)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def pids_of(engine_ids: set[str]) -> list[int]:
    """Their actors' processes (an id is HOST-PORT-PID), and those in which their models are."""
    actors = [int(engine_id.rpartition("-")[2]) for engine_id in engine_ids]
    models = [Path(f"/proc/{pid}/task/{task.name}/children") for pid in actors for task in tasks_of(pid)]
    return actors + [int(pid) for path in models for pid in path.read_text().split()]


def tasks_of(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/task").iterdir())


def driver_pid() -> int:
    (pid,) = [pid for pid in children() if b"ray_driver" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return pid


def node_of(cluster: Any, engine_id: str) -> Any:
    """The cluster's node on which an engine runs."""
    pid = int(engine_id.rpartition("-")[2])
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    for node in cluster.worker_nodes:
        processes = [info.process.pid for infos in node.all_processes.values() for info in infos]
        if parent in processes:
            return node
    raise AssertionError(f"no node has started process {pid}")


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_stream_outlives_a_node(start_service: StartService, cluster: Any, pool: PoolSettings) -> None:
    """Engines are on different nodes; when one is killed in mid-stream, its stream goes on, and Ray makes up for it."""
    service = await start_service(pool=pool, wait=False)
    engines = await until_serving(service)
    assert len({node_of(cluster, engine_id) for engine_id in engines}) == 2
    undisturbed = await ask(service, body(1, max_tokens=200))
    asking = asyncio.create_task(ask(service, body(1, max_tokens=200)))
    await service.until(lambda: service.front.client.num_live == 1)
    await asyncio.sleep(0.5)
    (busy,) = [member for member in service.front.client.members.values() if member.flights]
    lost = pids_of({busy.engine_id})
    await asyncio.to_thread(cluster.remove_node, node_of(cluster, busy.engine_id), allow_graceful=False)
    assert await asking == undisturbed
    await service.until(lambda: busy.engine_id not in {each.engine_id for each in service.front.client.serving})
    await until_serving(service)
    await until_gone(lost)
    cluster.add_node(num_cpus=1)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_engines_end_with_the_front_or_stay(start_service: StartService, pool: PoolSettings) -> None:
    """Without `ray_keep` nothing is left when the front ends; with it the next one serves with the same engines."""
    first = await start_service(pool=pool, wait=False)
    gone = pids_of(await until_serving(first))
    assert len(gone) == 4
    await first.app.cleanup()
    await until_gone(gone)
    keeping = msgspec.structs.replace(pool, ray_keep=True, namespace=secrets.token_hex(8))
    second = await start_service(pool=keeping, wait=False)
    kept = await until_serving(second)
    await second.app.cleanup()
    with pytest.raises(ValueError, match="engines is 1, and an earlier front has kept 2"):
        await RayEngines(Settings(pool=msgspec.structs.replace(keeping, engines=1))).run()
    with capture_logs() as logs:
        third = await start_service(pool=msgspec.structs.replace(keeping, ray_keep=False), wait=False)
        assert await until_serving(third) == kept
        await third.until(lambda: "engines placed by Ray" in {entry["event"] for entry in logs})
    gone = pids_of(kept)
    await third.app.cleanup()
    await until_gone(gone)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_stream_outlives_what_speaks_to_ray(start_service: StartService, pool: PoolSettings) -> None:
    """When the driver is killed, and every engine with it, others are placed and the stream goes on."""
    service = await start_service(pool=pool, wait=False)
    engines = await until_serving(service)
    undisturbed = await ask(service, body(2, max_tokens=200))
    asking = asyncio.create_task(ask(service, body(2, max_tokens=200)))
    await service.until(lambda: service.front.client.num_live == 1)
    await asyncio.sleep(0.5)
    os.kill(driver_pid(), signal.SIGKILL)
    await until_gone(pids_of(engines))
    assert await asking == undisturbed
    assert not engines & await until_serving(service)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_without_room_the_front_waits_and_can_be_ended(
    start_service: StartService, cluster: Any, pool: PoolSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More engines than the cluster has room for: the front says what they wait for, and ends when it is told to."""
    before = children()
    with capture_logs() as logs:
        service = await start_service(pool=msgspec.structs.replace(pool, engines=NODES + 1), wait=False)
        async with asyncio.timeout(120):
            while not (waits := [entry for entry in logs if "wait for a place" in entry["event"]]):
                await asyncio.sleep(0.1)
    assert (waits[0]["placed"], waits[0]["each_needs"]) == (0, {"CPU": 1.0})
    assert waits[0]["cluster_has"] == {"CPU": NODES, "GPU": 0}
    await service.app.cleanup()
    assert children() == before
