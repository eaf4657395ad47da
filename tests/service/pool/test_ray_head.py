"""The head of a Ray cluster is lost, and another one takes its place: on real nodes, started as an operator does."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator

import pytest
from structlog.testing import capture_logs

from service.pool.settings import PoolSettings
from tests.ray_node import RAY, RayNode
from tests.redis_server import RedisServer, free_port
from tests.service.conftest import StartService
from tests.service.pool.standalone import SECRET
from tests.service.pool.test_failover import ask, body
from tests.service.pool.test_ray import until_serving

StartNode = Callable[..., RayNode]


@pytest.fixture
def start_node() -> Iterator[StartNode]:
    """Starts nodes with flags of `ray start`; at the end nothing of them is left."""
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    nodes: list[RayNode] = []

    def start(*flags: str) -> RayNode:
        nodes.append(RayNode([*RAY, "start", *flags, "--disable-usage-stats", "--block"]))
        return nodes[-1]

    yield start
    for node in nodes:
        node.kill()


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_lost_head_costs_no_answer(
    start_service: StartService, start_node: StartNode, shared_redis: RedisServer
) -> None:
    """Without a head the engines that live go on; when there is another one at its address, they are placed again."""
    address = f"127.0.0.1:{free_port()}"
    head_flags = ["--head", f"--port={address.partition(':')[2]}", "--num-cpus=0", "--include-dashboard=false"]
    worker_flags = [f"--address={address}", "--num-cpus=1"]
    head = start_node(*head_flags)
    await head.until_it_says("Ray runtime started")
    worker = start_node(*worker_flags)
    pool = PoolSettings(
        engines=1,
        ray=address,
        store=shared_redis.url,
        namespace=secrets.token_hex(8),
        store_timeout=2.0,
        silence_seconds=3.0,
        secret=SECRET,
    )
    with capture_logs() as logs:
        service = await start_service(pool=pool, wait=False)
        before = await until_serving(service, 1)
        undisturbed = await ask(service, body(1))
        await asyncio.to_thread(head.kill)
        assert await ask(service, body(1)) == undisturbed
        assert {member.engine_id for member in service.front.client.serving} == before
        another = start_node(*head_flags)
        await another.until_it_says("Ray runtime started")
        # Ray ends the nodes of a head that is gone, in about a minute; whoever supervises them starts them again.
        await asyncio.to_thread(worker.kill)
        start_node(*worker_flags)
        async with asyncio.timeout(120):
            while not (now := {member.engine_id for member in service.front.client.serving}) or now & before:
                await asyncio.sleep(0.1)
        assert await ask(service, body(1)) == undisturbed
        await service.until(lambda: [each["event"] for each in logs].count("engines placed by Ray") == 2)
        await service.app.cleanup()
    lost = [entry for entry in logs if "cluster is lost" in entry["event"]]
    assert [(entry["log_level"], entry["address"]) for entry in lost] == [("warning", address)]
