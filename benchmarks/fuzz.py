"""Extreme values in every field of every route and every engine message, against a real service and a real engine.

    python -m benchmarks.fuzz [--minutes 15] [--seed 0] [--forerun-args FLAGS] [--json OUT]

Half of the time goes to a service over HTTP and WebSocket, half to a stand-alone engine over its own protocol. Faults
are: an answer with a 5xx status other than 503, an error without a reason or longer than 4 KiB, no answer, a process
that died, an ordinary greedy request that gets other tokens than before, a sequence or block that is left over, and
memory of the front that stays more than 20 MB above where it began. The exit status is 1 if there was one.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import shlex
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec

from benchmarks import termination
from benchmarks.forerun_service import serve_command
from benchmarks.fuzz_client import FuzzedSocket, exchange, fault_of
from benchmarks.fuzz_engine import EngineFault, fuzzed_engine, sampled_messages
from benchmarks.fuzz_requests import Request, body_requests, header_requests, path_requests, socket_messages
from benchmarks.idle import descendants, memory_mb
from benchmarks.machine import Machine, describe_machine
from benchmarks.server_process import Server, serving
from service.app import create_app
from service.settings import Settings

NUM_WORKERS = 4
"""Requests at a time, WebSockets included."""
REST_SECONDS = 60.0
"""Between the last request and the look at what is left."""
LOOK_SECONDS = 0.1
"""Between two looks at counts that go back to zero."""
MAX_GROWTH_MB = 20.0
MAX_FAULTS = 25
"""Faults after which a campaign ends: they repeat one another."""
FLAGS = ("--max-model-len", "512", "--num-blocks", "256")
CANARY = {"prompt": "One, two, three,", "max_tokens": 8, "temperature": 0, "speculation": "none"}

ItemT = TypeVar("ItemT")


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Something that must not happen, and what was sent."""

    what: str
    sent: str


class ServiceReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a service did."""

    requests: int
    statuses: dict[int, int]
    socket_messages: int
    memory_before_mb: float
    memory_after_mb: float
    faults: list[Fault]


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a stand-alone engine did."""

    messages: int
    outcomes: dict[str, int]
    faults: list[Fault]


class FuzzReport(msgspec.Struct, frozen=True, kw_only=True):
    """Both campaigns."""

    service: ServiceReport
    engine: EngineReport
    machine: Machine


def routes() -> list[tuple[str, str]]:
    """Method and path of every route of the service, as the router has them, HEAD left out."""
    found = {
        (route.method, route.resource.canonical) for route in create_app(Settings()).router.routes() if route.resource
    }
    return sorted((method, path) for method, path in found if method != "HEAD")


def all_requests() -> list[Request]:
    """Every request of the campaign, in a fixed order."""
    return [*body_requests(), *path_requests(routes()), *header_requests()]


class ServiceCampaign:
    """Sends extreme requests to a running service and keeps what went wrong."""

    def __init__(self, server: Server, session: aiohttp.ClientSession) -> None:
        self._server = server
        self._session = session
        self._pids = sorted(descendants(server.pid))
        self._expected: Any = None
        self.statuses: Counter[int] = Counter()
        self.num_messages = 0
        self.faults: list[Fault] = []

    async def run(self, requests: Iterable[Request], messages: Iterable[tuple[bytes, str]], deadline: float) -> None:
        """Send them all, some at a time, until `deadline` on the event loop's clock or too many faults."""
        await self.check("the start")
        rest, socket_rest = iter(requests), iter(messages)
        workers = [self._work(_until(rest, deadline), self._request) for _ in range(NUM_WORKERS - 1)]
        async with asyncio.TaskGroup() as group:
            for worker in workers:
                group.create_task(worker)
            group.create_task(self._talk(_until(socket_rest, deadline)))
        await self.check("the end")

    async def check(self, when: str) -> None:
        """Note a fault if a process died, an ordinary request gets another answer, or something is left over."""
        if sorted(descendants(self._server.pid)) != self._pids:
            self.faults.append(Fault(what="an engine died", sent=when))
        try:
            async with self._session.post(f"{self._server.url}/v1/completions", json=CANARY) as response:
                answer = (await response.json()).get("choices")
            if answer is None or answer != (self._expected or answer):
                self.faults.append(Fault(what=f"an ordinary request got {answer}", sent=when))
            self._expected = self._expected or answer
            if left := await self._left_over():
                self.faults.append(Fault(what=f"left over: {left}", sent=when))
        except aiohttp.ClientError as error:
            self.faults.append(Fault(what=f"an ordinary request failed: {error!r}", sent=when))

    async def _left_over(self) -> dict[str, int]:
        """Counts that are not back to zero, however long one waits."""
        names = ("waiting", "running", "sequences", "blocks_in_use")
        left: dict[str, int] = {}
        for _ in range(int(REST_SECONDS / LOOK_SECONDS)):
            async with self._session.get(f"{self._server.url}/v1/engines") as response:
                engines = (await response.json())["data"]
            left = {name: engine[name] for engine in engines for name in names if engine[name]}
            if not left:
                break
            await asyncio.sleep(LOOK_SECONDS)
        return left

    async def _work(self, items: Iterator[ItemT], send: Callable[[ItemT], Awaitable[None]]) -> None:
        for number, item in enumerate(items):
            if len(self.faults) >= MAX_FAULTS:
                return
            await send(item)
            if number % 500 == 499 and sorted(descendants(self._server.pid)) != self._pids:
                self.faults.append(Fault(what="an engine died", sent=f"one of 500 before {item!r:.300}"))
                self._pids = sorted(descendants(self._server.pid))

    async def _request(self, request: Request) -> None:
        sent = f"{request.method} {request.path[:100]}: {request.description}"
        try:
            answer = await exchange(self._server.url, request)
        except (TimeoutError, OSError) as error:
            self.faults.append(Fault(what=repr(error), sent=sent))
            return
        self.statuses[answer.status] += 1
        if fault := fault_of(request, answer):
            self.faults.append(Fault(what=fault, sent=sent))
        if answer.status == 201:  # an experiment: what comes next is not to be refused because it exists
            await self._remove(answer.body)

    async def _remove(self, body: bytes) -> None:
        name = msgspec.json.decode(body)["definition"]["name"]
        url = f"{self._server.url}/v1/experiments/{name}"
        async with self._session.post(f"{url}/stop"), self._session.delete(url):
            pass

    async def _talk(self, messages: Iterator[tuple[bytes, str]]) -> None:
        socket = FuzzedSocket(self._session, self._server.url)

        async def send(message: tuple[bytes, str]) -> None:
            data, description = message
            self.num_messages += 1
            if fault := await socket.send(data):
                self.faults.append(Fault(what=fault, sent=f"WebSocket: {description}"))

        await self._work(messages, send)
        await socket.close()


def _until(items: Iterator[ItemT], deadline: float) -> Iterator[ItemT]:
    """Items for as long as there is time."""
    clock = asyncio.get_running_loop().time
    return itertools.takewhile(lambda _: clock() < deadline, items)


@asynccontextmanager
async def running_campaign(flags: Sequence[str]) -> AsyncIterator[tuple[ServiceCampaign, Server]]:
    """A service to be fuzzed."""
    timeout = aiohttp.ClientTimeout(total=120.0)
    async with (
        serving(serve_command(flags), "/health/ready") as server,
        aiohttp.ClientSession(timeout=timeout) as session,
    ):
        yield ServiceCampaign(server, session), server


async def fuzz_service(flags: Sequence[str], seconds: float, seed: int) -> ServiceReport:
    """Send requests for `seconds`, then look what they left."""
    requests, messages = all_requests(), list(socket_messages())
    random.Random(seed).shuffle(requests)
    random.Random(seed).shuffle(messages)
    async with running_campaign(flags) as (campaign, server):
        await campaign.check("the start")
        before = memory_mb(server.pid)
        deadline = asyncio.get_running_loop().time() + seconds
        await campaign.run(_repeated(requests), _repeated(messages), deadline)
        await asyncio.sleep(REST_SECONDS)
        after = memory_mb(server.pid)
    if after - before > MAX_GROWTH_MB:
        what = f"the front has {after:.0f} MB, {after - before:.0f} more than at its start"
        campaign.faults.append(Fault(what=what, sent="everything"))
    return ServiceReport(
        requests=campaign.statuses.total(),
        statuses=dict(sorted(campaign.statuses.items())),
        socket_messages=campaign.num_messages,
        memory_before_mb=before,
        memory_after_mb=after,
        faults=campaign.faults,
    )


def _repeated(items: Sequence[ItemT]) -> Iterator[ItemT]:
    """The items a few times over: a long campaign does not run out of them."""
    return itertools.chain.from_iterable(itertools.repeat(items, 4))


async def fuzz_engine(flags: Sequence[str], seconds: float, seed: int) -> EngineReport:
    """Send messages for `seconds`, then look what they left."""
    faults: list[Fault] = []
    async with fuzzed_engine(flags) as engine:
        await engine.check()
        deadline = time.monotonic() + seconds
        for payload, description in _repeated(sampled_messages(seed)):
            if time.monotonic() > deadline or len(faults) >= MAX_FAULTS:
                break
            try:
                await engine.send(payload)
            except (EngineFault, OSError, TimeoutError) as error:
                faults.append(Fault(what=str(error) or repr(error), sent=description))
                engine.reset()
        try:
            await engine.check()
        except (EngineFault, OSError, TimeoutError) as error:
            faults.append(Fault(what=str(error) or repr(error), sent="the end"))
    return EngineReport(messages=engine.num_messages, outcomes=engine.outcomes, faults=faults)


async def fuzz(flags: Sequence[str], minutes: float, seed: int) -> FuzzReport:
    """Both campaigns, one after the other."""
    seconds = 60.0 * minutes / 2.0
    return FuzzReport(
        service=await fuzz_service([*FLAGS, *flags], seconds, seed),
        engine=await fuzz_engine([*FLAGS, *flags], seconds, seed),
        machine=describe_machine(),
    )


def main() -> int:
    """Send, print, write the report; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=15.0, help="for both campaigns together (default: 15)")
    parser.add_argument("--seed", type=int, default=0, help="of the order in which values are sent (default: 0)")
    parser.add_argument("--forerun-args", default="", metavar="FLAGS", help="flags of the service and of the engine")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the report there")
    arguments = parser.parse_args()
    try:
        report = termination.run(fuzz(shlex.split(arguments.forerun_args), arguments.minutes, arguments.seed))
    except (OSError, RuntimeError, EngineFault) as error:
        print(f"benchmarks.fuzz: {error}", file=sys.stderr)
        return 2
    service, engine = report.service, report.engine
    print(f"service: {service.requests} requests {service.statuses}, {service.socket_messages} WebSocket messages")
    print(f"front: {service.memory_before_mb:.1f} MB before, {service.memory_after_mb:.1f} MB after a rest")
    print(f"engine: {engine.messages} messages {engine.outcomes}")
    faults = [*service.faults, *engine.faults]
    for fault in faults:
        print(f"FAULT {fault.what}\n      {fault.sent}")
    print(f"{len(faults)} faults")
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
