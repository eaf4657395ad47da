"""How fast forerun decodes under several methods, and other systems beside it, in one interleaved run.

    python -m benchmarks.decode --questions FILE --methods none,ngram --peers transformers --limit N --max-tokens M
        --temperature T --batch B --json OUT

forerun is measured over HTTP as its clients see it: a server process of its own, chat completions, streamed. Every
question is first answered once, unmeasured, by plain decoding: that fixes how many tokens everybody generates for it,
and the token ids that every method must give. Then all systems answer it one after the other, in an order that
rotates from question to question, so that what else happens on the machine meets them all.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Protocol

import aiohttp
import msgspec

from benchmarks import termination
from benchmarks.conversation import Prompter
from benchmarks.forerun_service import ForerunMethod, running_service
from benchmarks.machine import describe_machine
from benchmarks.methods import read_methods
from benchmarks.peers import PEERS, PeerSettings, check_peers, running_peer
from benchmarks.questions import SMALL, Question, read_questions, spread
from benchmarks.report import Measurement, Report, of_answer, of_group, rows_of, service_of
from benchmarks.system import Answer, Ask, System
from benchmarks.table import table
from service.settings import load_settings
from speculation.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class Task:
    """One question's turn, and what plain decoding answers."""

    category: str
    ask: Ask
    token_ids: list[int]


class Reference(Protocol):
    """Plain decoding, which says what the right answer is."""

    async def natural_answer(self, ask: Ask) -> Answer:
        """An answer that ends where the model ends it, after `num_tokens` at the latest."""


class Run:
    """Systems that are ready, and what was measured of them."""

    def __init__(self, prompter: Prompter, reference: Reference, systems: Sequence[System]) -> None:
        self.measurements: list[Measurement] = []
        self._prompter = prompter
        self._reference = reference
        self._systems = systems
        self._first = 0

    async def measure(self, questions: Sequence[Question], *, max_tokens: int, turns: int, batch: int) -> None:
        """Ask everything of everybody, `batch` requests at a time."""
        tasks: list[Task] = []
        num_done, num_tasks = 0, sum(min(turns, len(question.turns)) for question in questions)
        async for task in self._tasks(questions, max_tokens, turns):
            tasks.append(task)
            num_done += 1
            if len(tasks) == batch or num_done == num_tasks:
                found = await self._measure(tasks, is_alone=batch == 1)
                self.measurements += found
                rates = (f"{each.system}/{each.method}={each.tokens_per_second or 0.0:.1f}" for each in found)
                print(f"{num_done}/{num_tasks} {task.category}", *rates, file=sys.stderr)
                tasks = []

    async def warm_up(self) -> None:
        """Let everybody answer once, unmeasured: what is made ready on first use is then ready."""
        ask = self._prompter.ask(["Name three primary colours."], [], num_tokens=8, seed=0)
        for system in self._systems:
            await system.answer([ask])

    async def _tasks(self, questions: Sequence[Question], max_tokens: int, turns: int) -> AsyncIterator[Task]:
        for question in questions:
            answers: list[list[int]] = []
            for turn in range(min(turns, len(question.turns))):
                users = question.turns[: turn + 1]
                ask = self._prompter.ask(users, answers, num_tokens=max_tokens, seed=question.question_id)
                token_ids = (await self._reference.natural_answer(ask)).token_ids
                answers.append(token_ids)
                yield Task(question.category, msgspec.structs.replace(ask, num_tokens=len(token_ids)), token_ids)

    async def _measure(self, tasks: Sequence[Task], *, is_alone: bool) -> list[Measurement]:
        """What each system made of it, in the order of the systems, whatever the order they ran in."""
        order = sorted(range(len(self._systems)), key=lambda index: (index - self._first) % len(self._systems))
        self._first += 1
        found = {}
        for index in order:
            system = self._systems[index]
            answers = await system.answer([task.ask for task in tasks])
            found[index] = _measurement(system, tasks, answers, is_alone=is_alone)
        return [found[index] for index in range(len(self._systems))]


def _measurement(system: System, tasks: Sequence[Task], answers: Sequence[Answer], *, is_alone: bool) -> Measurement:
    """Raises RuntimeError if a system generated another number of tokens than it was asked for."""
    for task, answer in zip(tasks, answers, strict=True):
        wanted = task.ask.num_tokens
        if answer.num_tokens != wanted:
            name = f"{system.name} {system.method}"
            raise RuntimeError(f"{name} gave {answer.num_tokens} tokens; {wanted} were asked for")
    is_exact = None
    if system.name == ForerunMethod.name:
        is_exact = all(answer.token_ids == task.token_ids for task, answer in zip(tasks, answers, strict=True))
    if is_alone:
        return of_answer(
            answers[0],
            system=system.name,
            method=system.method,
            precision=system.precision,
            category=tasks[0].category,
            num_prompt_tokens=len(tasks[0].ask.token_ids),
            is_exact=is_exact,
        )
    return of_group(
        answers,
        system=system.name,
        method=system.method,
        precision=system.precision,
        num_prompt_tokens=median(len(task.ask.token_ids) for task in tasks),
        is_exact=is_exact,
    )


async def run(arguments: argparse.Namespace) -> Report:
    """Start everything, measure, and stop everything."""
    machine = describe_machine()
    methods = read_methods(arguments.methods)
    peers = [name for name in arguments.peers.split(",") if name]
    check_peers(peers, arguments.batch)
    questions = read_questions(arguments.questions)
    chosen = spread(questions, arguments.limit or len(questions))
    flags = shlex.split(arguments.forerun_args)
    settings = peer_settings(arguments, load_settings(flags, os.environ).engine)
    prompter = Prompter(settings.model_folder)
    nonce = secrets.token_hex(8)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        service = await stack.enter_async_context(running_service(flags, session))
        systems: list[System] = [
            ForerunMethod(service, label, config, temperature=arguments.temperature, salt=f"{nonce} {label}")
            for label, config in methods
        ]
        for name in peers:
            print(f"starting {name}", file=sys.stderr)
            systems.append(await stack.enter_async_context(running_peer(name, settings, session)))
        plain = {"method": "none"}
        reference = ForerunMethod(service, "none", plain, temperature=arguments.temperature, salt=f"{nonce} reference")
        running = Run(prompter, reference, systems)
        await running.warm_up()
        await running.measure(chosen, max_tokens=arguments.max_tokens, turns=arguments.turns, batch=arguments.batch)
    return Report(
        rows=rows_of(running.measurements),
        exact=all(found.is_exact is not False for found in running.measurements),
        service=service_of(running.measurements),
        settings={
            "questions": arguments.questions.name,
            "limit": arguments.limit,
            "max_tokens": arguments.max_tokens,
            "turns": arguments.turns,
            "temperature": arguments.temperature,
            "batch": arguments.batch,
            "forerun_args": arguments.forerun_args,
        },
        machine=machine,
        machine_at_end=describe_machine(),
    )


def peer_settings(arguments: argparse.Namespace, engine: EngineSettings) -> PeerSettings:
    """What peers need to know of the model that forerun serves."""
    from speculation.assembly import model_folder

    folder = model_folder(engine.model, Path(engine.cache_dir).expanduser()).resolve()
    given = Path(engine.model).expanduser()
    return PeerSettings(
        engine=engine,
        model_folder=folder,
        gguf=(arguments.gguf or (given if given.suffix == ".gguf" else folder / "model.gguf")).resolve(),
        python=arguments.peers_python.absolute(),
        llama_server=arguments.llama_server,
        assistant=arguments.assistant,
        num_threads=len(os.sched_getaffinity(0)),
        temperature=arguments.temperature,
        batch=arguments.batch,
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("--questions", type=Path, default=SMALL, help="JSON lines; without it the project's own few")
    add("--methods", default="none,ngram", help='names, JSON like {"method": "ngram", "max_n": 4}, or label={…}')
    add("--peers", default="", help=f"any of {', '.join(PEERS)}")
    add("--limit", type=int, help="at most so many questions, spread over the categories")
    add("--turns", type=int, default=1, help="at most so many turns of a question (default: 1)")
    add("--max-tokens", type=int, default=128, help="longest answer; all systems generate as many as plain decoding")
    add("--temperature", type=float, default=0.0)
    add("--batch", type=int, default=1, help="requests at a time; above 1, tokens/s is all tokens over all time")
    add("--threads", type=int, help="cores that everything may use, threads of the peers; without it all there are")
    add("--forerun-args", default="", metavar="FLAGS", help='flags of the service, e.g. "--backend torch"')
    add("--peers-python", type=Path, default=Path(sys.executable), help="interpreter with requirements/peers.txt")
    add("--llama-server", type=Path, help="the program; without it that on PATH")
    add("--gguf", type=Path, help="GGUF file for llama.cpp and OpenVINO; without it the one the target came from")
    add("--assistant", type=Path, help="model folder that assists transformers-assisted, instead of prompt lookup")
    add("--json", type=Path, metavar="OUT", help="write the report there")
    return parser.parse_args(arguments)


def main() -> int:
    """Measure, print the table, write the report; 1 if some method changed an answer."""
    arguments = parse()
    if arguments.threads is not None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    try:
        report = termination.run(run(arguments))
    except (ValueError, OSError, RuntimeError) as error:
        print(f"benchmarks.decode: {error}", file=sys.stderr)
        return 2
    print(table(report))
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    return 0 if report.exact else 1


if __name__ == "__main__":
    sys.exit(main())
