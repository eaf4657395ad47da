"""What tests of every room share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping

# Before any library reads it: a test that would fetch something from a hub fails instead.
os.environ["HF_HUB_OFFLINE"] = "1"
# Threads that spin at a barrier would keep the ones they wait for off the processor.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Triton's kernels run in its interpreter, on a CPU. With a CUDA device at hand, 0 runs what is marked `gpu`.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from hypothesis import settings

from tests.redis_server import RedisServer

# Other processes share the machine, so how long an example took says nothing.
settings.register_profile("forerun", deadline=None, print_blob=True)
settings.load_profile("forerun")


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis for tests that leave it as they found it: each keeps to a namespace of its own."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
def start_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., RedisServer]]:
    """Starts a Redis for this test alone, to be hurt."""
    servers: list[RedisServer] = []

    def start(*options: str, password: str | None = None, environment: Mapping[str, str] | None = None) -> RedisServer:
        folder = tmp_path_factory.mktemp("redis")
        servers.append(RedisServer(folder, *options, password=password, environment=environment))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()
