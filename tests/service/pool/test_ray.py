"""Engines that Ray places: on a real local cluster of several nodes, one of which dies in mid-stream."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from service.pool.ray_engines import RayEngines
from service.pool.settings import PoolSettings
from service.settings import Settings
from tests.redis_server import RedisServer
from tests.service.conftest import Service, StartService
from tests.service.pool.test_failover import ask, body

ROOT = Path(__file__).resolve().parent.parent.parent.parent
SECRET = "correct horse"
NODES = 3


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"store": "memory"}, "ray needs a store"), ({"secret": None}, "ray needs secret")],
)
def test_engines_elsewhere_must_be_found_and_trusted(changes: dict[str, Any], says: str) -> None:
    """Without a store, or without a secret or certificates, the setting that is missing is named."""
    pool = PoolSettings(ray="auto", store="redis://127.0.0.1:1/0", secret=SECRET)
    with pytest.raises(ValueError, match=says):
        RayEngines(Settings(pool=msgspec.structs.replace(pool, **changes)))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head that takes no engines, and three nodes with room for one engine each."""
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    from ray.cluster_utils import Cluster

    # Nodes find the project where this test does.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(NODES):
        made.add_node(num_cpus=1)
    made.wait_for_nodes()
    yield made
    made.shutdown()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


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


@pytest.fixture
async def service(start_service: StartService, pool: PoolSettings) -> Service:
    started = await start_service(pool=pool, wait=False)
    async with asyncio.timeout(120):
        while len(started.front.client.serving) < 2:
            await asyncio.sleep(0.1)
    return started


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_stream_outlives_a_node(service: Service, cluster: Any, pool: PoolSettings) -> None:
    """Engines are on different nodes; when one is killed in mid-stream, its stream goes on, and Ray makes up for it."""
    assert len({node_of(cluster, engine_id) for engine_id in service.front.client.members}) == 2
    undisturbed = await ask(service, body(1, max_tokens=200))
    asking = asyncio.create_task(ask(service, body(1, max_tokens=200)))
    await service.until(lambda: service.front.client.num_live == 1)
    await asyncio.sleep(0.5)
    (busy,) = [member for member in service.front.client.members.values() if member.flights]
    victim = node_of(cluster, busy.engine_id)
    await asyncio.to_thread(cluster.remove_node, victim, allow_graceful=False)
    assert await asking == undisturbed
    async with asyncio.timeout(240):
        while len(service.front.client.serving) < 2:
            await asyncio.sleep(0.2)
    assert busy.engine_id not in {member.engine_id for member in service.front.client.serving}
    cluster.add_node(num_cpus=1)


def node_of(cluster: Any, engine_id: str) -> Any:
    """The cluster's node on which the process in an engine's id runs: HOST-PORT-PID."""
    pid = int(engine_id.rpartition("-")[2])
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    for node in cluster.worker_nodes:
        processes = [info.process.pid for infos in node.all_processes.values() for info in infos]
        if parent in processes:
            return node
    raise AssertionError(f"no node has started process {pid}")


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_engines_end_with_the_front_or_stay(start_service: StartService, pool: PoolSettings) -> None:
    """Without `ray_keep` no actor is left when the front ends; with it the next front serves with the same engines."""
    first = await start_service(pool=pool, wait=False)
    async with asyncio.timeout(120):
        while len(first.front.client.serving) < 2:
            await asyncio.sleep(0.1)
    pids = [int(engine_id.rpartition("-")[2]) for engine_id in first.front.client.members]
    await first.app.cleanup()
    async with asyncio.timeout(30):
        while any(Path(f"/proc/{pid}").exists() for pid in pids):  # noqa: ASYNC240 - no disk
            await asyncio.sleep(0.1)
    keeping = msgspec.structs.replace(pool, ray_keep=True, namespace=secrets.token_hex(8))
    second = await start_service(pool=keeping, wait=False)
    async with asyncio.timeout(120):
        while len(second.front.client.serving) < 2:
            await asyncio.sleep(0.1)
    kept = set(second.front.client.members)
    await second.app.cleanup()
    third = await start_service(pool=keeping, wait=False)
    async with asyncio.timeout(120):
        while len(third.front.client.serving) < 2:
            await asyncio.sleep(0.1)
    assert set(third.front.client.members) == kept
    import ray

    for index in range(2):
        ray.kill(ray.get_actor(f"engine-{index}", namespace=f"forerun-{keeping.namespace}"))
