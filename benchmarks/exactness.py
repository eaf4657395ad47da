"""Whether the speculation config changes an answer: real questions, every method, greedy and sampled, alone and not.

    python -m benchmarks.exactness --questions FILE --methods none,ngram --limit 24 --max-tokens 128 --batches 1,8
        --draft-layers 4 --forerun-args "--backend torch" --json OUT

Each question is first answered alone by plain decoding. Then every method answers all questions, one at a time and so
many at once, and lastly all methods at once in one batch. Everything goes over HTTP. The status is 1 if one token of
one answer differs.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import secrets
import shlex
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from benchmarks import termination
from benchmarks.conversation import Prompter
from benchmarks.forerun_service import ForerunMethod, ForerunService, running_service
from benchmarks.methods import Method, read_methods
from benchmarks.questions import SMALL, read_questions, spread
from benchmarks.system import Answer, Ask
from service.settings import load_settings


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; every question has a seed of its own."""

    temperature: float
    top_p: float


SAMPLINGS = (Sampling(0.0, 1.0), Sampling(0.8, 0.95))


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One method's answers to all questions beside those of plain decoding alone."""

    method: str
    temperature: float
    batch: int
    num_answers: int
    num_tokens: int
    mean_acceptance_length: float
    different: list[int]
    """Ids of the questions whose answers differ."""


class Trial:
    """The questions, a service and what it must answer."""

    def __init__(self, service: ForerunService, asks: Mapping[int, Ask], sampling: Sampling, salt: str) -> None:
        """`asks` by question id."""
        self._service = service
        self._asks = asks
        self._sampling = sampling
        self._salt = salt
        self._wanted: dict[int, list[int]] = {}

    async def begin(self) -> None:
        """Let plain decoding say what is right, one question at a time."""
        plain = self._method(Method("none", {"method": "none"}), "reference")
        for question_id, ask in self._asks.items():
            self._wanted[question_id] = (await plain.natural_answer(ask)).token_ids

    async def compare(self, methods: Sequence[Method], batch: int) -> Comparison:
        """Ask everything, `batch` questions at a time; with several methods, in turn each of them."""
        label = " + ".join(method.label for method in methods)
        asking = itertools.cycle([self._method(method, f"{label} {batch}") for method in methods])
        gate = asyncio.Semaphore(batch)

        async def one(question_id: int, method: ForerunMethod) -> tuple[int, Answer]:
            async with gate:
                return question_id, await method.natural_answer(self._asks[question_id])

        found = await asyncio.gather(*(one(question_id, next(asking)) for question_id in self._asks))
        num_drafts = sum(answer.num_drafts or 0 for _, answer in found)
        return Comparison(
            method=label,
            temperature=self._sampling.temperature,
            batch=batch,
            num_answers=len(found),
            num_tokens=sum(answer.num_tokens for _, answer in found),
            mean_acceptance_length=1.0 + sum(answer.num_accepted or 0 for _, answer in found) / max(num_drafts, 1),
            different=[number for number, answer in found if answer.token_ids != self._wanted[number]],
        )

    def _method(self, method: Method, salt: str) -> ForerunMethod:
        """Each with a prefix cache of its own, so that nobody leans on what another computed."""
        return ForerunMethod(
            self._service,
            method.label,
            method.speculation,
            temperature=self._sampling.temperature,
            top_p=self._sampling.top_p,
            salt=f"{self._salt} {salt} {self._sampling}",
        )


async def compare_all(arguments: argparse.Namespace, folder: Path) -> AsyncIterator[Comparison]:
    """Every comparison, as soon as it is made. `folder` is for what has to lie somewhere meanwhile."""
    methods = read_methods(arguments.methods)
    batches = [int(part) for part in arguments.batches.split(",")]
    questions = spread(read_questions(arguments.questions), arguments.limit)
    flags = shlex.split(arguments.forerun_args)
    model_folder = _model_folder(flags)
    if arguments.draft_layers is not None:
        flags += ["--draft-model", str(_first_layers(model_folder, folder, arguments.draft_layers))]
    prompter = Prompter(model_folder)
    asks = {
        question.question_id: prompter.ask(
            question.turns[:1], [], num_tokens=arguments.max_tokens, seed=question.question_id
        )
        for question in questions
    }
    async with aiohttp.ClientSession() as session, running_service(flags, session) as service:
        for sampling in SAMPLINGS:
            trial = Trial(service, asks, sampling, secrets.token_hex(8))
            await trial.begin()
            for method, batch in itertools.product(methods, batches):
                yield await trial.compare([method], batch)
            yield await trial.compare(methods, max(batches))


def _model_folder(flags: Sequence[str]) -> Path:
    from speculation.assembly import model_folder

    engine = load_settings(flags, os.environ).engine
    return model_folder(engine.model, Path(engine.cache_dir).expanduser()).resolve()


def _first_layers(model_folder: Path, folder: Path, num_layers: int) -> Path:
    """A poor draft model: the target's own first layers."""
    from target.checkpoint import truncate_checkpoint

    truncate_checkpoint(model_folder, folder / "draft", num_layers)
    return folder / "draft"


def line(found: Comparison) -> str:
    """A comparison as people read it."""
    verdict = f"DIFFERENT: questions {', '.join(map(str, found.different))}" if found.different else "the same"
    return (
        f"{found.method}, temperature {found.temperature:g}, {found.batch} at once: {found.num_answers} answers, "
        f"{found.num_tokens} tokens, {found.mean_acceptance_length:.2f} a draft, {verdict}"
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exactness", description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("--questions", type=Path, default=SMALL, help="JSON lines; without it the project's own few")
    add("--methods", default="none,ngram,suffix,auto", help="as in benchmarks.decode")
    add("--limit", type=int, default=24, help="so many questions, spread over the categories (default: 24)")
    add("--max-tokens", type=int, default=128, help="longest answer (default: 128)")
    add("--batches", default="1,8", help="how many questions at once, in turn (default: 1,8)")
    add("--draft-layers", type=int, metavar="N", help="draft_model is the target's own first N layers")
    add("--forerun-args", default="", metavar="FLAGS", help='flags of the service, e.g. "--backend torch"')
    add("--json", type=Path, metavar="OUT", help="write the comparisons there")
    return parser.parse_args(arguments)


async def _run(arguments: argparse.Namespace) -> list[Comparison]:
    found = []
    with tempfile.TemporaryDirectory(prefix="forerun-") as folder:
        async for comparison in compare_all(arguments, Path(folder)):
            print(line(comparison), flush=True)
            found.append(comparison)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print; 1 if an answer differs, 2 for bad input."""
    arguments = parse(argv)
    try:
        found = termination.run(_run(arguments))
    except (ValueError, OSError, RuntimeError) as error:
        print(f"benchmarks.exactness: {error}", file=sys.stderr)
        return 2
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    return 1 if any(comparison.different for comparison in found) else 0


if __name__ == "__main__":
    sys.exit(main())
