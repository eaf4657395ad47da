"""Engines that only listen, in a pool on a clock that stands still; and engines of their own, in a real Redis."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cache_store.guarded_store import GuardedStore
from cache_store.memory_store import MemoryStore
from cache_store.store_health import StoreHealth
from service.engine_client import EngineUnavailableError
from service.pool.engine_pool import EnginePool
from service.pool.member import Member
from service.pool.prefixes import Prefixes
from service.pool.routing import RoundRobin, Routing
from service.pool.settings import PoolSettings
from speculation.messages import (
    Command,
    Ready,
    SamplingParams,
    SequenceOutput,
    Stats,
    StepOutputs,
    Submit,
    TokenLogprob,
)
from tests.redis_server import RedisServer
from tests.service.pool.standalone import SECRET, Standalone, StartEngine

READY = Ready(
    model_fingerprint="f",
    model_folder=".",
    max_model_len=1000,
    vocab_size=100,
    num_blocks=100,
    block_size=16,
    methods=["none"],
    max_waiting=4,
    description="",
    max_num_seqs=8,
)


def submit(request_id: str, *, prompt: list[int] | None = None, salt: str = "", **sampling: int) -> Submit:
    prompt_token_ids = [1, 2, 3] if prompt is None else prompt
    return Submit(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
        cache_salt=salt,
    )


def output(request_id: str, *token_ids: int, finish: str | None = None) -> SequenceOutput:
    return SequenceOutput(
        request_id=request_id,
        token_ids=list(token_ids),
        logprobs=[TokenLogprob(-1.0, 1, [], []) for _ in token_ids],
        finish_reason=finish,
    )


@dataclass
class Engine:
    """An engine that only listens."""

    member: Member
    sent: list[Command] = field(default_factory=list)

    def serve(self, **changes: int) -> None:
        self.member.attach(msgspec.structs.replace(READY, **changes), self.sent.append)

    def say(self, *outputs: SequenceOutput) -> None:
        self.member.dispatch(StepOutputs(list(outputs)))

    def die(self, code: str = "engine_died") -> None:
        self.member.detach(EngineUnavailableError("it was ended by SIGKILL", code))

    @property
    def submitted(self) -> list[Submit]:
        return [command for command in self.sent if isinstance(command, Submit)]


@dataclass
class Pool:
    """A pool with its engines and its time."""

    pool: EnginePool
    engines: list[Engine]
    prefixes: Prefixes
    store: MemoryStore
    stats: list[Stats]
    gaps: list[float]
    prompts: list[tuple[Submit, Sequence[bytes], int, int]]
    """What was said of each prompt."""
    time: list[float]

    def wait(self, seconds: float) -> None:
        """Let time pass, and the pool look after those who wait."""
        self.time[0] += seconds
        self.pool._place_waiting()

    def holder(self, request_id: str) -> Engine:
        """The engine that was given a sequence last."""
        found = [engine for engine in self.engines if request_id in engine.member.flights]
        assert len(found) == 1
        return found[0]


def make_pool(num_engines: int, routing: Routing | None = None, *, attempts: int = 3) -> Pool:
    time = [1000.0]
    stats: list[Stats] = []
    gaps: list[float] = []
    prompts: list[tuple[Submit, Sequence[bytes], int, int]] = []
    store = MemoryStore(clock=lambda: time[0])
    prefixes = Prefixes(GuardedStore(store, StoreHealth()), clock=lambda: time[0])
    pool = EnginePool(
        routing or RoundRobin(),
        prefixes,
        on_stats=stats.append,
        on_gap=gaps.append,
        on_prompt=lambda *prompt: prompts.append(prompt),
        failover_seconds=30.0,
        failover_attempts=attempts,
        clock=lambda: time[0],
    )
    engines = [Engine(pool.add(f"engine-{index}", "local")) for index in range(num_engines)]
    for engine in engines:
        engine.serve()
    return Pool(pool, engines, prefixes, store, stats, gaps, prompts, time)


@pytest.fixture
def one() -> Pool:
    """A pool of one engine."""
    return make_pool(1)


@pytest.fixture
def two() -> Pool:
    """A pool of two engines, which take turns."""
    return make_pool(2)


@pytest.fixture
def three() -> Pool:
    """A pool of three engines, which take turns."""
    return make_pool(3)


@pytest.fixture
def pool(shared_redis: RedisServer) -> PoolSettings:
    """The settings of a front without engines, in a namespace of its own."""
    return PoolSettings(
        engines=0,
        store=shared_redis.url,
        namespace=secrets.token_hex(8),
        store_timeout=2.0,
        silence_seconds=1.5,
        secret=SECRET,
    )


@pytest.fixture
async def start_engine(model_folder: Path, tmp_path: Path, pool: PoolSettings) -> AsyncIterator[StartEngine]:
    """Starts stand-alone engines; what is left of them at the end is killed."""
    engines: list[Standalone] = []
    numbers = itertools.count()

    async def start(*flags: str, **options: Any) -> Standalone:
        settings = ["--store", pool.store, "--namespace", pool.namespace, "--store-timeout", "2"]
        settings += ["--max-model-len", "10000"]
        environment = {"FORERUN_SECRET": SECRET, **options.pop("environment", {})}
        log = tmp_path / f"engine-{next(numbers)}.log"
        engine = await Standalone.start(model_folder, log, *settings, *flags, environment=environment, **options)
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        await engine.stop()
