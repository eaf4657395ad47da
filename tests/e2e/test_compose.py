"""Each profile of compose.yaml with services of ours: its commands run, and serve, without Docker."""

from __future__ import annotations

import asyncio
import json
import signal
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.random_model import write_random_model
from tests.e2e.compose import OURS, SERVICES, Deployment, is_healthy
from tests.e2e.test_deployment import metrics_in_use
from tests.ray_node import RAY, RayNode
from tests.redis_server import RedisServer, free_port


def ask(port: int) -> dict[str, Any]:
    """A completion that repeats itself, so that something is guessed."""
    body = json.dumps({"prompt": [5, 6, 7, 8] * 10, "max_tokens": 24, "temperature": 0, "speculation": "ngram"})
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body.encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310 - our own address
        return dict(json.load(response))


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as response:
        return str(response.read().decode())


def known_metrics(page: str) -> set[str]:
    """Every name on a page for Prometheus."""
    return {sample.name for family in text_string_to_metric_families(page) for sample in family.samples}


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that starts quickly, in the place of the embedded one."""
    return write_random_model(tmp_path_factory.mktemp("model"), hidden_size=64, num_layers=2)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The volume in which compiled steps stay from one container to the next."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def deployment(start_redis: Callable[..., RedisServer], random_model: Path, models: Path, tmp_path: Path) -> Deployment:
    """Redis as compose starts it, but for where it keeps its file."""
    _, *flags = SERVICES["redis"]["command"]
    return Deployment(start_redis(*flags), random_model, models, tmp_path)


async def test_the_default_service_serves(deployment: Deployment) -> None:
    """`docker compose up` without a profile: healthy by its own check, it answers; every metric in deploy/ is there."""
    async with deployment.running("forerun") as port:
        assert (await asyncio.to_thread(ask, port))["usage"]["completion_tokens"] == 24
        async with asyncio.timeout(30):
            while unknown := metrics_in_use() - known_metrics(await asyncio.to_thread(get, port, "/metrics")):
                await asyncio.sleep(0.2)
                await asyncio.to_thread(ask, port)
        assert not unknown


async def test_the_gpu_service_serves(deployment: Deployment) -> None:
    """The profile `gpu` with a CPU in the place of its device: healthy by its own check, it answers."""
    async with deployment.running("forerun-gpu", {"cuda": "cpu"}) as port:
        assert (await asyncio.to_thread(ask, port))["usage"]["completion_tokens"] == 24


async def test_without_a_device_the_gpu_service_says_so(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profile `gpu` where there is no CUDA device: it does not serve on a CPU instead, but ends with the reason."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    process, log = await deployment.start("forerun-gpu", free_port())
    async with asyncio.timeout(120):
        assert await process.wait() == 1
    assert "device is 'cuda', but torch sees no CUDA device; 'auto' or 'cpu' would work" in log.read_text()
    assert "Traceback" not in log.read_text()


async def test_the_pool_serves_with_the_engines_it_finds(deployment: Deployment) -> None:
    """The profile `pool` with two engines: both are found, used, and healthy by their own check."""
    async with deployment.running("engine"), deployment.running("engine"), deployment.running("front") as port:
        await until_engines_serve(port, 2)
        answers = [await asyncio.to_thread(ask, port) for _ in range(2)]
        assert answers[0]["choices"] == answers[1]["choices"]


async def until_engines_serve(port: int, num_engines: int) -> list[dict[str, Any]]:
    """Wait until a front has so many; what it says of them."""
    async with asyncio.timeout(60):
        while True:
            engines: list[dict[str, Any]] = json.loads(await asyncio.to_thread(get, port, "/v1/engines"))["data"]
            if sum(engine["state"] == "serving" for engine in engines) == num_engines:
                return engines
            await asyncio.sleep(0.2)


@pytest.fixture
def start_ray(deployment: Deployment) -> Iterator[Callable[..., RayNode]]:
    """Starts containers of the profile `ray`; at the end nothing of them is left."""
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    nodes: list[RayNode] = []

    def start(name: str, port: int, cluster: str) -> RayNode:
        nodes.append(deployment.start_ray(name, port, cluster, {"RAY_ENGINES": "1"}))
        return nodes[-1]

    yield start
    for node in nodes:
        node.kill()


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_ray_places_the_engines(start_ray: Callable[..., RayNode]) -> None:
    """The profile `ray` with one engine: both are healthy by their own checks, Ray starts the engine on the worker, it
    answers, and on SIGTERM the front takes it down and ends well.
    """
    port, cluster = free_port(), f"127.0.0.1:{free_port()}"
    front = start_ray("front-ray", port, cluster)
    await front.until_it_says("Ray runtime started")
    worker = start_ray("ray-worker", port, cluster)
    async with asyncio.timeout(240):
        while not await is_healthy(OURS["front-ray"], port):
            assert front.process.poll() is None, front.log()[-3000:]
            assert worker.process.poll() is None, worker.log()[-3000:]
            await asyncio.sleep(0.3)
    (engine,) = await until_engines_serve(port, 1)
    assert engine["address"].startswith("tcp://")
    assert int(engine["id"].rpartition("-")[2]) in worker.pids()
    assert (await asyncio.to_thread(ask, port))["usage"]["completion_tokens"] == 24
    _, program, *check = OURS["ray-worker"]["healthcheck"]["test"]
    assert program == "ray"
    arguments = [word.replace("front-ray:6379", cluster) for word in check]
    status = await asyncio.create_subprocess_exec(*RAY, *arguments, stdout=asyncio.subprocess.DEVNULL)
    assert await status.wait() == 0
    front.process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(front.process.wait, 60) == 0, front.log()[-3000:]
    async with asyncio.timeout(60):
        while int(engine["id"].rpartition("-")[2]) in worker.pids():
            await asyncio.sleep(0.1)
