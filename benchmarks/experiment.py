"""Experiments on the real service: does it find the faster config by itself, and find nothing where there is nothing?

    python -m benchmarks.experiment [--samples 300] [--concurrency 8] [--json OUT] [-- SERVICE FLAGS]

Starts a service and sends it copy-heavy requests of many lengths, each of which asks for a text that stands in its
prompt. Every few seconds there are more clients or fewer, up to `--concurrency`.
First an A/A experiment (`ngram` against itself), then `none` against `ngram`; either may promote, after `--samples`
requests at the earliest. Prints both verdicts and, worked out from the same requests with a look after each, how many
samples it would have taken with and without covariates, for the experiment's metric and for others.
The exit status is 1 if a verdict is not what it should be.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from benchmarks import termination
from benchmarks.machine import Machine, describe_machine
from benchmarks.server_process import serving
from service.experiments.assignment import Place
from service.experiments.evaluation import compare, levels_of
from service.experiments.html_report import interval
from service.experiments.model import Definition, Metric
from service.experiments.report import Effect, Report
from service.experiments.sheet import Sheet
from service.experiments.tally import Outcome, Request, Tally, record
from service.experiments.validation import parse_definition

PLAIN = {"method": "none"}
NGRAM = {"method": "ngram"}
PROMOTE = {"action": "promote", "cool_down_seconds": 600.0}
SECONDS_A_SAMPLE = 2.0
"""On average no more; then time is up. A sample takes about a quarter of that on two idle cores."""
PAUSE_SECONDS = 0.3
"""Between an answer and the client's next request, on average."""
TIDE_SECONDS = 4.0
"""How long the number of clients stays what it is."""
FIRST_LOOK = 20
"""Before so many requests no interval is worth a look."""
COMPARED: tuple[Metric, ...] = ("tpot", "latency_per_token", "ttft")
"""Metrics; experiments conclude from the first. Tokens per second are the second, upside down."""
NOT_KNOWN = Effect(speedup=None, low=None, high=None)
ROW = "  {:18} {:>26} {:>26} {:>15} {:>8} {:>6}"
# fmt: off
WORDS = [
    "amber", "anchor", "basket", "bridge", "candle", "canyon", "castle", "cobalt", "copper", "desert", "engine",
    "falcon", "forest", "garden", "glacier", "granite", "harbour", "island", "jungle", "kettle", "ladder",
    "lantern", "marble", "meadow", "mirror", "mountain", "orchard", "palace", "pepper", "planet", "quarry", "river",
    "saddle", "sailor", "silver", "spider", "summit", "temple", "thunder", "tunnel", "valley", "velvet", "village",
    "violin", "walnut", "window", "winter",
]
# fmt: on


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One request as its client knows it."""

    arm: str
    num_prompt_tokens: int
    queue_depth: int
    num_output_tokens: int
    ttft: float
    end_to_end: float


class MetricFinding(msgspec.Struct, frozen=True, kw_only=True):
    """What the requests of one experiment say in one metric: arm b against arm a, with covariates and without."""

    metric: Metric
    adjusted: Effect
    unadjusted: Effect
    samples_needed: int | None
    """First request after which the interval left out 0, with covariates; None if it never did."""
    samples_needed_unadjusted: int | None
    samples_saved: float | None
    """1 less the ratio of the variances with and without covariates, at the end."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One experiment and what came of it."""

    name: str
    verdict: str
    """The service's own words."""
    winner: str | None
    """The arm that was promoted."""
    default: str | None
    """The default profile afterwards."""
    seconds: float
    num_samples: int
    metrics: list[MetricFinding]
    """The experiment's own first."""
    is_right: bool
    report: Report


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What --json writes."""

    machine: Machine
    load_average_at_end: float
    concurrency: int
    flags: list[str]
    findings: list[Finding]
    audit: dict[str, Any]
    """The service's exactness audit meanwhile."""


class Load:
    """Copy-heavy requests. As in most traffic lengths differ and clients come and go, so that the queue is not always
    as long.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, concurrency: int, seed: int) -> None:
        self._session = session
        self._url = url
        self._concurrency = concurrency
        self._random = random.Random(seed)
        self._num_running = 0
        self._num_clients = concurrency

    async def run(self, is_over: Callable[[], bool]) -> list[Seen]:
        """What requests that took part in an experiment saw, in the order of their answers."""
        seen: list[Seen] = []

        async def client(number: int) -> None:
            while not is_over():
                one = await self.ask() if number < self._num_clients else None
                if one is not None:
                    seen.append(one)
                await asyncio.sleep(self._random.expovariate(1.0 / PAUSE_SECONDS))

        tide = asyncio.create_task(self._rise_and_fall())
        try:
            await asyncio.gather(*(client(number) for number in range(self._concurrency)))
        finally:
            tide.cancel()
        return seen

    async def _rise_and_fall(self) -> None:
        while True:
            self._num_clients = self._random.randint(1, self._concurrency)
            await asyncio.sleep(TIDE_SECONDS)

    async def ask(self) -> Seen | None:
        """One request; None if it took part in nothing. Raises RuntimeError if it is not answered."""
        text = self._passage()
        body = {
            "prompt": f"{text}\n\nThe same text once more:\n\n{text[:40]}",
            "max_tokens": self._random.randint(8, 96),
            "temperature": 0.0,
            "ignore_eos": True,
        }
        queue_depth, self._num_running = self._num_running, self._num_running + 1
        try:
            async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
                answer = await response.json()
                arm = response.headers.get("X-Forerun-Arm")
        finally:
            self._num_running -= 1
        if response.status != 200:
            raise RuntimeError(f"a request failed: {answer}")
        if arm is None:
            return None
        timing = answer["metrics"]["timing"]
        return Seen(
            arm=arm,
            num_prompt_tokens=answer["usage"]["prompt_tokens"],
            queue_depth=queue_depth,
            num_output_tokens=timing["tokens"],
            ttft=timing["ttft"],
            end_to_end=timing["end_to_end"],
        )

    def _passage(self) -> str:
        """A text that no other request has."""
        sentences = []
        for _ in range(self._random.randint(2, 14)):
            one, two, three = self._random.sample(WORDS, 3)
            sentences.append(f"The {one} near the {two} holds {self._random.randint(100, 999)} pieces of {three}.")
        return " ".join(sentences)


async def call(session: aiohttp.ClientSession, method: str, url: str, body: object = None) -> Any:
    """The JSON of an answer. Raises RuntimeError with the service's own words for an error."""
    async with session.request(method, url, json=body) as response:
        answer = await response.json()
        if response.status >= 400:
            raise RuntimeError(answer["error"]["message"])
        return answer


async def experiment(
    session: aiohttp.ClientSession, url: str, load: Load, definition: dict[str, Any], *, right: str | None
) -> Finding:
    """Run one experiment under load until the service ends it. `right` is the arm that is to be promoted, if one is."""
    where = f"{url}/v1/experiments/{definition['name']}"
    started = time.monotonic()
    await call(session, "POST", f"{url}/v1/experiments", definition)
    following = asyncio.create_task(
        _until_ended(session, where, started + SECONDS_A_SAMPLE * definition["max_samples"])
    )
    seen = await load.run(following.done)
    view = await following
    took = time.monotonic() - started
    default = (await call(session, "GET", f"{url}/v1/speculation"))["default"]
    promotion = view["promotion"]
    if view["status"] in {"running", "promoted"}:
        await call(session, "POST", f"{where}/stop")  # with it ends the cool-down, and the report is the experiment's
    final = await call(session, "GET", where)
    report = msgspec.convert(final["report"], Report)
    parsed = parse_definition(msgspec.json.encode(definition))
    winner = None if promotion is None else definition["arms"][promotion["arm"]]["name"]
    return Finding(
        name=definition["name"],
        verdict=view["ended_because"] or f"not ended in {took:.0f} s: {report.verdict}",
        winner=winner,
        default=default,
        seconds=round(took, 1),
        num_samples=report.num_samples,
        metrics=[finding_of(msgspec.structs.replace(parsed, metric=metric), seen) for metric in COMPARED],
        is_right=winner == right
        and view["status"] != "running"
        and (winner is None or default == promotion["profile"]),
        report=report,
    )


async def _until_ended(session: aiohttp.ClientSession, where: str, deadline: float) -> dict[str, Any]:
    """The experiment as it is when it has ended, or when time is up."""
    while True:
        view: dict[str, Any] = await call(session, "GET", where)
        if view["status"] != "running" or time.monotonic() > deadline:
            return view
        await asyncio.sleep(0.5)


def finding_of(definition: Definition, seen: Sequence[Seen]) -> MetricFinding:
    """What the service's statistics find in these requests, with a look after each."""
    tally = Tally()
    adjusted = unadjusted = saved = None
    needed: list[int | None] = [None, None]
    for number, one in enumerate(seen, start=1):
        count(tally, definition, one)
        levels = levels_of(Sheet(tally, definition), [0, 1]) if number >= FIRST_LOOK else None
        if levels is None:
            continue
        (comparison,) = compare(definition, levels)
        adjusted, unadjusted, saved = comparison.adjusted, comparison.unadjusted, comparison.samples_saved
        for index, effect in enumerate((adjusted, unadjusted)):
            needed[index] = needed[index] or (number if leaves_out_0(effect) else None)
    return MetricFinding(
        metric=definition.metric,
        adjusted=adjusted or NOT_KNOWN,
        unadjusted=unadjusted or NOT_KNOWN,
        samples_needed=needed[0],
        samples_needed_unadjusted=needed[1],
        samples_saved=saved,
    )


def count(tally: Tally, definition: Definition, seen: Seen) -> None:
    """Add a request as a front would, which knows the queue where its client knows its own requests."""
    arms = definition.arm_names
    share = 1.0 / len(arms)
    place = Place(arms.index(seen.arm), share, 0, 0, is_counted=True)
    outcome = Outcome(
        status="finished",
        num_output_tokens=seen.num_output_tokens,
        ttft_seconds=seen.ttft,
        latency_seconds=seen.end_to_end,
    )
    request = Request(place, [share] * len(arms), seen.num_prompt_tokens, float(seen.queue_depth))
    record(tally, definition, request, outcome)


def leaves_out_0(effect: Effect) -> bool:
    return (effect.low is not None and effect.low > 0.0) or (effect.high is not None and effect.high < 0.0)


async def measure(
    samples: int, concurrency: int, seed: int, flags: Sequence[str], show: Callable[[str], None]
) -> Result:
    """Both experiments, one after the other, on one service."""
    machine = describe_machine()

    def command(port: int) -> list[str]:
        return [sys.executable, "-m", "service", *flags, "--port", str(port)]

    async with serving(command, "/health/ready") as server, aiohttp.ClientSession() as session:
        load = Load(session, server.url, concurrency, seed)
        for _ in range(2 * concurrency):
            await load.ask()  # what is compiled and measured once is no matter of arms
        common = {"metric": COMPARED[0], "min_samples": samples, "max_samples": samples, "at_end": PROMOTE}
        findings = []
        for name, one, other, right in (("same", NGRAM, NGRAM, None), ("lookup", PLAIN, NGRAM, "b")):
            arms = [{"name": "a", "speculation": one}, {"name": "b", "speculation": other}]
            definition = {"name": name, "arms": arms, **common}
            findings.append(await experiment(session, server.url, load, definition, right=right))
            show(describe(findings[-1]))
        audit = await call(session, "GET", f"{server.url}/v1/audit")
    return Result(
        machine=machine,
        load_average_at_end=os.getloadavg()[0],
        concurrency=concurrency,
        flags=list(flags),
        findings=findings,
        audit=audit,
    )


def describe(finding: Finding) -> str:
    """A finding in a few lines."""
    default = finding.default or "of the engine"
    right = "as it should be" if finding.is_right else "NOT as it should be"
    promoted = f"arm promoted: {finding.winner or 'none'}; default now: {default}; {right}"
    lines = [
        f"{finding.name}: {finding.verdict}",
        f"  {finding.num_samples} samples in {finding.seconds:.0f} s; {promoted}",
        ROW.format("metric", "with covariates", "without", "samples needed", "without", "saved"),
        *map(_row, finding.metrics),
    ]
    return "\n".join(lines)


def _row(found: MetricFinding) -> str:
    saved = "–" if found.samples_saved is None else f"{100 * found.samples_saved:.0f} %"
    needed = (found.samples_needed or "never", found.samples_needed_unadjusted or "never")
    return ROW.format(found.metric, interval(found.adjusted), interval(found.unadjusted), *needed, saved)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.experiment", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=300, help="requests of each experiment")
    parser.add_argument("--concurrency", type=int, default=8, help="most requests at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("flags", nargs="*", help="flags of the service, behind --")
    chosen = parser.parse_args(arguments)
    result = termination.run(measure(chosen.samples, chosen.concurrency, chosen.seed, chosen.flags, print))
    if chosen.json:
        chosen.json.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    return 0 if all(finding.is_right for finding in result.findings) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
