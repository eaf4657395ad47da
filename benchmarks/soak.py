"""Mixed traffic for a long time while engines are killed: right tokens, right counts, flat memory, nothing left over.

    python -m benchmarks.soak [--minutes 60] [--kill-seconds 60] [--questions FILE] [--forerun-args FLAGS] [--json OUT]

Every request has a seed and was answered once by plain decoding before the first kill; each later answer, by whatever
method and protocol and over however many engines, must have those tokens. Some clients leave, some cancel, some ask
wrongly. At the end the service's counters must be those of the clients, no sequence and no block may be in use, and
over the second half of the time the memory of the front must not grow by more than 0.05 MB a minute. The exit status
is 1 if one of these does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import termination
from benchmarks.forerun_service import serve_command
from benchmarks.idle import descendants, memory_mb
from benchmarks.machine import Machine, describe_machine
from benchmarks.questions import SMALL, read_questions
from benchmarks.server_process import Server, serving
from benchmarks.soak_client import (
    CHAT,
    SOCKET,
    TEXT,
    WRONG,
    Case,
    SoakClient,
    WrongAnswerError,
    make_cases,
    sending_trace,
)

NUM_WORKERS = 4
NUM_CASES = 40
LOOK_SECONDS = 10.0
"""Between two looks at the front's memory."""
SETTLE_SECONDS = 60.0
"""Longest wait at the end until nothing is in use."""
MAX_SLOPE = 0.05
"""MB a minute of resident memory, which does not change when another process maps the same files."""
MAX_FAULTS = 50
FLAGS = ("--engines", "2")


class SoakReport(msgspec.Struct, frozen=True, kw_only=True):
    """What happened, and what must not have."""

    minutes: float
    answers: dict[str, int]
    """Numbers of answers by route and status."""
    left: int
    """Streams that their clients left."""
    completion_tokens: int
    kills: int
    resumed: int
    """Sequences that went on in another engine."""
    memory_mb: list[float]
    """Memory of the front, every `LOOK_SECONDS`."""
    slope_mb_per_minute: float
    """Least squares over the second half."""
    faults: list[str]
    machine: Machine


class Soak:
    """The traffic, the kills and the looks, beside one another."""

    def __init__(self, server: Server, session: aiohttp.ClientSession, questions: Path, seed: int) -> None:
        self._server = server
        self._session = session
        self._client = SoakClient(session, server.url)
        self._cases = make_cases(read_questions(questions), NUM_CASES, seed)
        self._rng = random.Random(seed)
        self._configs: list[Any] = []
        self.faults: list[str] = []
        self.memory: list[float] = []
        self.num_kills = 0

    async def run(self, minutes: float, kill_seconds: float) -> SoakReport:
        """Everything from the first plain answer to the last count."""
        methods = (await self._get("/v1/speculation"))["methods"]
        self._configs = [{"method": method} for method in methods if method != "first"]
        self._configs.append({"method": "first", "proposers": [{"method": "suffix"}, {"method": "ngram"}]})
        self._cases = [
            msgspec.structs.replace(case, token_ids=await self._client.ask(case, {"method": "none"}))
            for case in self._cases
        ]
        deadline = asyncio.get_running_loop().time() + 60.0 * minutes
        async with asyncio.TaskGroup() as group:
            side = [group.create_task(self._watch()), group.create_task(self._kill(kill_seconds))]
            workers = [group.create_task(self._work(deadline)) for _ in range(NUM_WORKERS)]
            await asyncio.wait(workers)
            for task in side:
                task.cancel()
        await self._settle()
        await self._compare_counters()
        growth = slope(self.memory)
        if growth > MAX_SLOPE:
            self.faults.append(f"the front's memory grew by {growth:.3f} MB a minute over the second half")
        return SoakReport(
            minutes=minutes,
            answers={f"{route} {status}": count for (route, status), count in sorted(self._client.answers.items())},
            left=self._client.num_left.total(),
            completion_tokens=self._client.num_completion_tokens,
            kills=self.num_kills,
            resumed=(await self._get("/v1/engines"))["resumed"],
            memory_mb=self.memory,
            slope_mb_per_minute=growth,
            faults=self.faults,
            machine=describe_machine(),
        )

    async def _work(self, deadline: float) -> None:
        while asyncio.get_running_loop().time() < deadline and len(self.faults) < MAX_FAULTS:
            case, config = self._rng.choice(self._cases), self._rng.choice(self._configs)
            kind = self._rng.choices(("whole", "stream", "socket", "leave", "cancel", "wrong"), (6, 6, 4, 2, 2, 2))[0]
            try:
                await self._one(kind, case, config)
            except (WrongAnswerError, aiohttp.ClientError, TimeoutError, TypeError) as error:
                self.faults.append(f"{kind} {config} seed {case.body['seed']}: {error!r}")

    async def _one(self, kind: str, case: Case, config: Any) -> None:
        client, seconds = self._client, self._rng.uniform(0.0, 0.5)
        match kind:
            case "whole":
                compare(case, await client.ask(case, config))
            case "stream":
                compare(case, await client.ask_streamed(case, config))
            case "socket":
                compare(case, await client.ask_on_socket(case, config))
            case "leave":
                await client.ask_streamed(case, config, leave_after=seconds)
            case "cancel":
                await client.ask_on_socket(case, config, cancel_after=seconds)
            case _:
                await client.ask_wrongly(*self._rng.choice(WRONG))

    async def _kill(self, seconds: float) -> None:
        """Now and then kill an engine, while another serves."""
        while True:
            await asyncio.sleep(seconds)
            engines = (await self._get("/v1/engines"))["data"]
            if all(engine["state"] == "serving" for engine in engines):
                os.kill(self._rng.choice(_engine_pids(self._server.pid)), signal.SIGKILL)
                self.num_kills += 1

    async def _watch(self) -> None:
        while True:
            self.memory.append(memory_mb(self._server.pid, "Rss"))
            await asyncio.sleep(LOOK_SECONDS)

    async def _settle(self) -> None:
        """Wait until nothing is in use; what is after a minute is a fault."""
        names = ("waiting", "running", "sequences", "blocks_in_use")
        left: list[str] = []
        for _ in range(int(SETTLE_SECONDS)):
            engines = (await self._get("/v1/engines"))["data"]
            left = [f"{name} of {each['id']}: {each[name]}" for each in engines for name in names if each[name]]
            if not left and all(engine["state"] == "serving" for engine in engines):
                return
            await asyncio.sleep(1.0)
        self.faults.append(f"after {SETTLE_SECONDS:g} s there is still {left or 'an engine that does not serve'}")

    async def _compare_counters(self) -> None:
        """The service's counters beside the clients'; how a request that was left ended only the service knows."""
        async with self._session.get(f"{self._server.url}/metrics") as response:
            samples = [
                sample for family in text_string_to_metric_families(await response.text()) for sample in family.samples
            ]
        client = self._client
        for route in (TEXT, CHAT, SOCKET):
            theirs = {
                int(sample.labels["status"]): int(sample.value)
                for sample in samples
                if sample.name == "forerun_requests_total" and sample.labels["route"] == route
            }
            ours = {status: count for (known, status), count in client.answers.items() if known == route}
            num_left = client.num_left[route]
            ended = theirs.pop(499, 0) + theirs.get(200, 0) - ours.get(200, 0)
            theirs[200], ours[200] = theirs.get(200, 0) if not num_left else 0, ours.get(200, 0) if not num_left else 0
            if theirs != ours or ended != num_left:
                self.faults.append(f"{route}: the service counts {theirs} and {ended} left, clients {ours}, {num_left}")
        tokens = sum(each.value for each in samples if each.name == "forerun_tokens_total" and _is_completion(each))
        excess = tokens - client.num_completion_tokens
        if not 0 <= excess <= client.num_left_tokens:
            self.faults.append(f"the service counts {tokens:.0f} tokens, clients {client.num_completion_tokens}")
        deaths = sum(each.value for each in samples if each.name == "forerun_pool_engine_deaths_total")
        if deaths != self.num_kills:
            self.faults.append(f"{deaths:.0f} engines died, of which {self.num_kills} were killed")
        if diverged := sum(each.value for each in samples if each.name == "forerun_audit_divergences_total"):
            self.faults.append(f"the audit found {diverged:.0f} answers with other tokens")

    async def _get(self, path: str) -> Any:
        async with self._session.get(self._server.url + path) as response:
            return await response.json()


def _is_completion(sample: Any) -> bool:
    return bool(sample.labels["kind"] == "completion")


def compare(case: Case, token_ids: list[int]) -> None:
    """Raise `WrongAnswerError` for other tokens than plain decoding gave."""
    if token_ids != case.token_ids:
        raise WrongAnswerError(f"got {token_ids}, plain decoding {case.token_ids}")


def _engine_pids(pid: int) -> list[int]:
    return [each for each in descendants(pid) if b"speculation.worker" in Path(f"/proc/{each}/cmdline").read_bytes()]


def slope(memory: Sequence[float]) -> float:
    """MB a minute, by least squares over the second half of the looks."""
    half = np.array(memory[len(memory) // 2 :])
    if len(half) < 2:
        return 0.0
    minutes = np.arange(len(half)) * LOOK_SECONDS / 60.0
    return float(np.polyfit(minutes, half, 1)[0])


async def soak(arguments: argparse.Namespace) -> SoakReport:
    """Start a service and let it work."""
    flags = [*FLAGS, *shlex.split(arguments.forerun_args)]
    timeout = aiohttp.ClientTimeout(total=180.0)
    async with (
        serving(serve_command(flags), "/health/ready") as server,
        aiohttp.ClientSession(timeout=timeout, trace_configs=[sending_trace()]) as session,
    ):
        run = Soak(server, session, arguments.questions, arguments.seed)
        return await run.run(arguments.minutes, arguments.kill_seconds)


def main() -> int:
    """Run, print, write the report; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="of traffic (default: 60)")
    parser.add_argument("--kill-seconds", type=float, default=60.0, help="between two kills (default: 60)")
    parser.add_argument("--questions", type=Path, default=SMALL, help="JSON lines in the shape of Spec-Bench's")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of requests (default: 0)")
    parser.add_argument("--forerun-args", default="", metavar="FLAGS", help="further flags of the service")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the report there")
    arguments = parser.parse_args()
    try:
        report = termination.run(soak(arguments))
    except (OSError, RuntimeError, ValueError) as error:
        print(f"benchmarks.soak: {error}", file=sys.stderr)
        return 2
    for name, count in report.answers.items():
        print(f"{count:8} {name}")
    print(f"{report.left:8} streams left by their clients")
    print(f"{report.completion_tokens} tokens, {report.kills} kills, {report.resumed} sequences went on elsewhere")
    memory = report.memory_mb
    print(f"front: {memory[0]:.1f} MB, at the end {memory[-1]:.1f}; {report.slope_mb_per_minute:+.3f} MB a minute")
    for fault in report.faults:
        print(f"FAULT {fault[:600]}")
    print(f"{len(report.faults)} faults")
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
