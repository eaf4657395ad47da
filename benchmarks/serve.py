"""Replay a trace of production traffic against a server, and say what its clients saw.

    python -m benchmarks.serve --trace CSV --scale S --json OUT [--url URL]

Without --url a forerun is started for it; with it, any server that speaks OpenAI's /v1/completions with token ids as
prompts and knows `ignore_eos` can be measured: forerun, llama-server, vLLM. Arrivals are as recorded, S times as fast,
whether or not earlier requests have been answered. Prompts are stretches of real questions as long as the trace says,
answers are exactly as long as it says. The run is bounded in requests and in time.
"""

from __future__ import annotations

import argparse
import random
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from benchmarks import termination
from benchmarks.forerun_service import serve_command
from benchmarks.load import Client, Distribution, LoadReport, replay
from benchmarks.machine import Machine, describe_machine
from benchmarks.methods import read_methods
from benchmarks.questions import SMALL, read_questions
from benchmarks.server_process import serving
from benchmarks.trace import read_trace, schedule
from service.tokenizer import Tokenizer
from target.embedded import embedded_model_dir


class ServeReport(msgspec.Struct, frozen=True, kw_only=True):
    """A replay and what it was made with."""

    load: LoadReport
    settings: dict[str, str | int | float | None]
    machine: Machine
    machine_at_end: Machine


class PromptSource:
    """Prompts of any length, from the texts of questions; two rarely begin alike."""

    def __init__(self, token_ids: Sequence[int], seed: int) -> None:
        self._token_ids = list(token_ids)
        self._random = random.Random(seed)

    def take(self, num_tokens: int) -> list[int]:
        first = self._random.randrange(len(self._token_ids))
        repeats = (first + num_tokens) // len(self._token_ids) + 1
        return (self._token_ids * repeats)[first : first + num_tokens]


async def run(arguments: argparse.Namespace) -> ServeReport:
    """Replay, with a server of our own if no other is named."""
    machine = describe_machine()
    requests = schedule(
        read_trace(arguments.trace),
        scale=arguments.scale,
        length_scale=arguments.length_scale,
        max_context=arguments.max_context,
        limit=arguments.limit,
        max_seconds=arguments.max_seconds,
    )
    tokenizer = Tokenizer.load(arguments.model_folder or embedded_model_dir())
    texts = [turn for question in read_questions(arguments.questions) for turn in question.turns]
    prompts = PromptSource(tokenizer.encode("\n\n".join(texts), add_special=False), arguments.seed)
    fields: dict[str, Any] = {"ignore_eos": True}
    if arguments.speculation is not None:
        (method,) = read_methods(arguments.speculation)
        fields["speculation"] = method.speculation
    connector = aiohttp.TCPConnector(limit=0)
    async with _server(arguments) as url, aiohttp.ClientSession(connector=connector) as session:
        fields["model"] = arguments.model or await _model_name(session, url)
        load = await replay(
            requests,
            Client(session, url, fields),
            prompts.take,
            drain_seconds=arguments.drain_seconds,
            progress=_progress(),
        )
    return ServeReport(
        load=load,
        settings={
            "trace": arguments.trace.name,
            "url": arguments.url,
            "speculation": arguments.speculation,
            "scale": arguments.scale,
            "length_scale": arguments.length_scale,
            "max_context": arguments.max_context,
            "limit": arguments.limit,
            "max_seconds": arguments.max_seconds,
            "forerun_args": arguments.forerun_args,
        },
        machine=machine,
        machine_at_end=describe_machine(),
    )


@asynccontextmanager
async def _server(arguments: argparse.Namespace) -> AsyncIterator[str]:
    if arguments.url is not None:
        yield arguments.url.rstrip("/").removesuffix("/v1")
        return
    async with serving(serve_command(shlex.split(arguments.forerun_args)), "/health/ready") as server:
        yield server.url


async def _model_name(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(f"{url}/v1/models") as response:
        return str((await response.json())["data"][0]["id"])


def _progress() -> Callable[[str], None]:
    return partial(print, end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)


def table(report: LoadReport) -> str:
    """The report as people read it."""
    statuses = ", ".join(f"{count} {status}" for status, count in report.statuses.items())
    rates = (
        f"{report.requests_per_second:.2f} requests/s, {report.prompt_tokens_per_second:.1f} prompt tokens/s, "
        f"{report.output_tokens_per_second:.1f} output tokens/s"
    )
    lines = [
        f"{report.requests} requests in {report.seconds:.1f} s: {statuses}",
        rates,
        f"\n{'ms':>20} {'mean':>10} {'p50':>10} {'p90':>10} {'p95':>10} {'p99':>10} {'max':>10}",
    ]
    named = {
        "time to first token": report.ttft_ms,
        "time per token": report.tpot_ms,
        "between arrivals": report.itl_ms,
        "end to end": report.e2e_ms,
    }
    return "\n".join([*lines, *(_line(name, found) for name, found in named.items())])


def _line(name: str, found: Distribution | None) -> str:
    values = () if found is None else (found.mean, found.p50, found.p90, found.p95, found.p99, found.max)
    return f"{name:>20}" + "".join(f" {value:10.1f}" for value in values)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("--trace", type=Path, required=True, help="CSV with TIMESTAMP, ContextTokens, GeneratedTokens")
    add("--scale", type=float, default=1.0, help="how many times as fast as recorded requests arrive (default: 1)")
    add("--length-scale", type=float, default=1.0, help="prompts and answers are so many times as long (default: 1)")
    add("--max-context", type=int, default=4096, help="prompts are cut so that prompt and answer fit in so many tokens")
    add("--limit", type=int, default=200, help="at most so many requests (default: 200)")
    add("--max-seconds", type=float, default=300.0, help="none is sent after so many seconds (default: 300)")
    add("--drain-seconds", type=float, default=120.0, help="how long to wait for answers after the last (default: 120)")
    add("--url", help="a running server; without it forerun is started")
    add("--model", help="name to ask for; without it the first that the server lists")
    add("--model-folder", type=Path, help="its tokenizer.json makes the prompts; without it the embedded model's")
    add("--questions", type=Path, default=SMALL, help="JSON lines whose text fills the prompts; many, so none repeats")
    add("--speculation", help="forerun's request field: a method, or JSON; without it the server's default")
    add("--forerun-args", default="", metavar="FLAGS", help="flags of the forerun that is started")
    add("--seed", type=int, default=0, help="which stretches of text become prompts")
    add("--json", type=Path, metavar="OUT", help="write the report there")
    return parser.parse_args(arguments)


def main() -> int:
    """Replay, print the table, write the report; 1 if a request was not answered."""
    arguments = parse()
    try:
        report = termination.run(run(arguments))
    except (ValueError, OSError, RuntimeError) as error:
        print(f"benchmarks.serve: {error}", file=sys.stderr)
        return 2
    print(table(report.load))
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    return 0 if report.load.statuses.keys() <= {"ok"} else 1


if __name__ == "__main__":
    sys.exit(main())
