"""What the metadata store costs: nothing on an engine's step, and one short round trip for a look-up.

    python -m benchmarks.store_path --json OUT

Tokens a second of the same load with the store in memory, in Redis, and in a Redis that was killed; the three take
turns in several rounds. And how long a look-up of a long prompt over several engines takes. Starts a Redis of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median

import aiohttp
import msgspec

from benchmarks import termination
from benchmarks.event_stream import post
from benchmarks.forerun_service import serve_command
from benchmarks.machine import Machine, describe_machine
from benchmarks.random_model import VOCAB_SIZE, write_random_model
from benchmarks.server_process import serving
from cache_store.hashing import block_hashes, root_hash
from cache_store.metadata import BlockBatch, EngineStatus
from cache_store.redis_store import RedisStore
from tests.redis_server import RedisServer

STORES = ("memory", "redis", "redis killed")
NUM_STREAMS = 4
NUM_TOKENS = 200


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens a second with one store over those with another in the same round."""

    median: float
    low: float
    high: float
    """Between which the middle half of the rounds is."""

    @classmethod
    def of(cls, rates: Sequence[float], base: Sequence[float]) -> Ratio:
        ratios = sorted(rate / other for rate, other in zip(rates, base, strict=True))
        quarter = len(ratios) // 4
        return cls(median=round(median(ratios), 4), low=round(ratios[quarter], 4), high=round(ratios[-1 - quarter], 4))


class StoreReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything, on one machine, in one run."""

    tokens_per_second: dict[str, list[float]]
    """By store, one a round."""
    against_memory: dict[str, Ratio]
    """Of each other store."""
    lookup_ms_median: float
    lookup_ms_p95: float
    lookup_tokens: int
    lookup_engines: int
    hashing_ms_median: float
    """Of the same prompt, in the front, before the look-up."""
    machine: Machine
    machine_at_end: Machine


async def time_lookups(url: str, *, num_tokens: int, num_engines: int, repetitions: int) -> tuple[list[float], float]:
    """Milliseconds of each look-up of a prompt that every engine holds, and the median of hashing it."""
    store = RedisStore(url, namespace=secrets.token_hex(8), timeout_seconds=10.0)
    token_ids = [number % VOCAB_SIZE for number in range(num_tokens)]
    hashing = []
    for _ in range(20):
        started = time.perf_counter()
        hashes = block_hashes(root_hash("model", ""), token_ids, 16)
        hashing.append(1000 * (time.perf_counter() - started))
    engine_ids = [f"engine-{number}" for number in range(num_engines)]
    for engine_id in engine_ids:
        await store.announce(
            EngineStatus(engine_id=engine_id, instance="i", address="tcp://x:1", model_fingerprint="model")
        )
        await store.publish(BlockBatch(engine_id=engine_id, instance="i", sequence=1, reset=True, stored=hashes))
    taken = []
    for _ in range(repetitions):
        started = time.perf_counter()
        await store.lookup(hashes, engine_ids)
        taken.append(1000 * (time.perf_counter() - started))
    await store.close()
    return taken, median(hashing)


@asynccontextmanager
async def service_with(folder: Path, store: str) -> AsyncIterator[str]:
    """The address of a service with one engine and a store."""
    flags = ["--model", str(folder), "--num-blocks", "400", "--speculation", "none", "--device", "cpu"]
    async with serving(serve_command([*flags, "--store", store, "--log-level", "error"]), "/health/ready") as server:
        yield server.url


async def tokens_per_second(session: aiohttp.ClientSession, url: str) -> float:
    """Of a few streams at a time."""

    async def ask(number: int) -> None:
        body = {"prompt": [1 + number] * 40, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
        await post(session, f"{url}/v1/completions", {**body, "temperature": 0.0})

    started = time.perf_counter()
    await asyncio.gather(*(ask(number) for number in range(NUM_STREAMS)))
    return NUM_STREAMS * NUM_TOKENS / (time.perf_counter() - started)


async def run(rounds: int, num_lookups: int) -> StoreReport:
    machine = describe_machine()
    rates: dict[str, list[float]] = {store: [] for store in STORES}
    with tempfile.TemporaryDirectory() as folder:
        alive, killed = (RedisServer(_made(Path(folder, name))) for name in ("alive", "killed"))
        try:
            lookups, hashing = await time_lookups(alive.url, num_tokens=4000, num_engines=8, repetitions=num_lookups)
            model = write_random_model(Path(folder), hidden_size=256, num_layers=4)
            addresses = dict(zip(STORES, ("memory", alive.url, killed.url), strict=True))
            async with AsyncExitStack() as stack:
                session = await stack.enter_async_context(aiohttp.ClientSession())
                urls = {
                    name: await stack.enter_async_context(service_with(model, address))
                    for name, address in addresses.items()
                }
                killed.kill()
                for number in range(rounds + 1):
                    for name in STORES:
                        rate = await tokens_per_second(session, urls[name])
                        if number:  # the first round warms up
                            rates[name].append(round(rate, 1))
        finally:
            alive.kill()
            killed.kill()
    return StoreReport(
        tokens_per_second=rates,
        against_memory={name: Ratio.of(rates[name], rates["memory"]) for name in STORES if name != "memory"},
        lookup_ms_median=round(median(lookups), 3),
        lookup_ms_p95=round(sorted(lookups)[int(0.95 * len(lookups))], 3),
        lookup_tokens=4000,
        lookup_engines=8,
        hashing_ms_median=round(hashing, 3),
        machine=machine,
        machine_at_end=describe_machine(),
    )


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store_path", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where the report goes")
    parser.add_argument("--rounds", type=int, default=9, help="how often each store has its turn")
    parser.add_argument("--lookups", type=int, default=300, help="how many look-ups are timed")
    arguments = parser.parse_args(argv)
    report = termination.run(run(arguments.rounds, arguments.lookups))
    arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))
    for name, rates in report.tokens_per_second.items():
        print(f"{name:<13} {median(rates):7.1f} tokens/s at the median, {max(rates):7.1f} at best")
    for name, ratio in report.against_memory.items():
        print(f"{name} against memory, round by round: {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})")
    print(
        f"look-up of {report.lookup_tokens} tokens over {report.lookup_engines} engines: "
        f"{report.lookup_ms_median:.2f} ms at the median, {report.lookup_ms_p95:.2f} ms at p95; "
        f"hashing {report.hashing_ms_median:.2f} ms"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
