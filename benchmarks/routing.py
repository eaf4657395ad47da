"""What routing by prefix is worth: the same requests over the same engines, by each rule in turn.

    python -m benchmarks.routing --json OUT

8 groups of requests; those of a group begin with the same 500 tokens and go on with a question of their own. 200 of
them in random order, a few at a time, over 3 engines whose caches hold about three groups each, so that who gets what
matters. The model is random and small: only the work counts. Each rule starts with fresh engines.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import msgspec

from benchmarks import termination
from benchmarks.event_stream import post
from benchmarks.forerun_service import serve_command
from benchmarks.load import Distribution
from benchmarks.machine import Machine, describe_machine
from benchmarks.random_model import VOCAB_SIZE, write_random_model
from benchmarks.server_process import serving

BLOCK_SIZE = 16
RULES = ("round_robin", "random", "prefix_only", "least_ttft")


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked. Lengths in tokens."""

    num_groups: int = 8
    num_prefix_tokens: int = 500
    num_question_tokens: int = 24
    num_output_tokens: int = 8
    num_requests: int = 200
    num_concurrent: int = 4
    num_engines: int = 3
    num_blocks: int = 120
    """Of each engine's cache."""
    seed: int = 0


class RuleReport(msgspec.Struct, frozen=True, kw_only=True):
    """The requests under one rule."""

    routing: str
    prefix_hit_rate: float
    """Cached / prompt tokens."""
    ttft_ms: Distribution
    seconds: float
    """For all requests."""


class RoutingReport(msgspec.Struct, frozen=True, kw_only=True):
    """All rules on one machine, in one run."""

    workload: Workload
    rules: list[RuleReport]
    hit_rate_ratio: float
    """Least predicted TTFT over round robin."""
    median_ttft_ratio: float
    """The same; below 1 is sooner."""
    machine: Machine
    machine_at_end: Machine


class Answered(msgspec.Struct, frozen=True):
    """One request."""

    ttft: float
    num_prompt_tokens: int
    num_cached_tokens: int


def prompts(workload: Workload) -> list[list[int]]:
    """The requests, in order."""
    rng = random.Random(workload.seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(1, VOCAB_SIZE) for _ in range(count)]

    prefixes = [tokens(workload.num_prefix_tokens) for _ in range(workload.num_groups)]
    groups = [number % workload.num_groups for number in range(workload.num_requests)]
    rng.shuffle(groups)
    return [[*prefixes[group], *tokens(workload.num_question_tokens)] for group in groups]


async def measure(rule: str, folder: Path, workload: Workload) -> RuleReport:
    """One rule, on engines of its own."""
    flags = [
        *("--model", str(folder), "--engines", str(workload.num_engines), "--routing", rule),
        *("--num-blocks", str(workload.num_blocks), "--block-size", str(BLOCK_SIZE), "--speculation", "none"),
        *("--device", "cpu", "--log-level", "warning"),
    ]
    async with serving(serve_command(flags), "/health/ready") as server, aiohttp.ClientSession() as session:
        await _until_all_serve(session, server.url, workload.num_engines)
        # The first steps of a process are slow; they are nobody's.
        warm_up = [[1 + number] * 200 for number in range(2 * workload.num_engines)]
        await _ask_all(session, server.url, warm_up, workload)
        started = time.perf_counter()
        answers = await _ask_all(session, server.url, prompts(workload), workload)
        seconds = time.perf_counter() - started
    ttft = Distribution.of(answer.ttft for answer in answers)
    assert ttft is not None
    hit_rate = sum(each.num_cached_tokens for each in answers) / sum(each.num_prompt_tokens for each in answers)
    return RuleReport(routing=rule, prefix_hit_rate=hit_rate, ttft_ms=ttft, seconds=seconds)


async def _until_all_serve(session: aiohttp.ClientSession, url: str, num_engines: int) -> None:
    async with asyncio.timeout(600):
        while True:
            async with session.get(f"{url}/v1/engines") as response:
                engines = (await response.json())["data"]
            if sum(engine["state"] == "serving" for engine in engines) == num_engines:
                return
            await asyncio.sleep(0.2)


async def _ask_all(
    session: aiohttp.ClientSession, url: str, asked: Sequence[Sequence[int]], workload: Workload
) -> list[Answered]:
    """A few at a time, each as soon as one before it is answered."""
    places = asyncio.Semaphore(workload.num_concurrent)

    async def ask(prompt: Sequence[int]) -> Answered:
        async with places:
            return await _ask(session, url, prompt, workload)

    return await asyncio.gather(*(ask(prompt) for prompt in asked))


async def _ask(session: aiohttp.ClientSession, url: str, prompt: Sequence[int], workload: Workload) -> Answered:
    body = {
        "prompt": list(prompt),
        "max_tokens": workload.num_output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    sent_at = time.perf_counter()
    events = await post(session, f"{url}/v1/completions", body)
    usage = msgspec.json.decode(events[-1].data)["usage"]
    return Answered(
        ttft=events[0].at - sent_at,
        num_prompt_tokens=usage["prompt_tokens"],
        num_cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
    )


async def run(workload: Workload, rules: Sequence[str], model: Path | None) -> RoutingReport:
    """Every rule in turn, printed as it is measured."""
    machine = describe_machine()
    reports: dict[str, RuleReport] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = model or write_random_model(Path(folder), hidden_size=512, num_layers=6)
        print(f"{'routing':<12} {'hit rate':>9} {'TTFT median':>12} {'p95':>9} {'seconds':>8}")
        for rule in rules:
            report = reports[rule] = await measure(rule, path, workload)
            print(
                f"{rule:<12} {report.prefix_hit_rate:>8.1%} {report.ttft_ms.p50:>9.1f} ms"
                f" {report.ttft_ms.p95:>6.1f} ms {report.seconds:>8.1f}",
                flush=True,
            )
    aware, blind = reports["least_ttft"], reports["round_robin"]
    return RoutingReport(
        workload=workload,
        rules=list(reports.values()),
        hit_rate_ratio=aware.prefix_hit_rate / blind.prefix_hit_rate if blind.prefix_hit_rate else float("inf"),
        median_ttft_ratio=aware.ttft_ms.p50 / blind.ttft_ms.p50,
        machine=machine,
        machine_at_end=describe_machine(),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where the report goes")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES), help="which rules, in this order")
    parser.add_argument("--requests", type=int, default=Workload().num_requests, help="how many requests")
    parser.add_argument("--model", type=Path, help="a model folder instead of the random one")
    arguments = parser.parse_args(argv)
    rules = list(dict.fromkeys(["round_robin", *arguments.rules, "least_ttft"]))
    workload = Workload(num_requests=arguments.requests)
    report = termination.run(run(workload, rules, arguments.model))
    arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))
    print(
        f"\nleast_ttft against round_robin: {report.hit_rate_ratio:.2f} times the hit rate, "
        f"{report.median_ttft_ratio:.2f} of the median TTFT"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
