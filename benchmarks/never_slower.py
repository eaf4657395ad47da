"""Whether guessing ever costs anything, where it can hardly win: it against plain decoding, request by request.

    python -m benchmarks.never_slower --json OUT

Three kinds of traffic: prompts of random words; questions at temperature 1.5, where every guess is a gamble; and many
requests at the same time, whose rows leave little room for guesses. The real service, over HTTP; each request, or each
batch of them, goes to plain decoding and to the method in turn, in alternating order, under salts of their own. The
ratio is that of median tokens/s; beside it stands the range in which nine of ten resampled runs lie. About two minutes.
The exit status is 1 if a method changed an answer or is slower than 0.97 of plain decoding.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from statistics import median

import aiohttp
import msgspec

from benchmarks import termination
from benchmarks.conversation import Prompter
from benchmarks.forerun_service import ForerunMethod, ForerunService, running_service
from benchmarks.machine import Machine, describe_machine
from benchmarks.methods import Method, read_methods
from benchmarks.questions import SMALL, read_questions
from benchmarks.system import Answer, Ask
from service.settings import load_settings
from service.tokenizer import Tokenizer
from speculation.settings import EngineSettings

BOUND = 0.97
"""Of plain decoding's tokens/s: what a method must reach everywhere."""
PLAIN = Method("none", {"method": "none"})
NUM_RESAMPLED = 2000


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of traffic under one method."""

    traffic: str
    method: str
    tokens_per_second: float
    plain_tokens_per_second: float
    ratio: float
    ratio_low: float
    ratio_high: float
    """Nine of ten resampled runs lie between."""
    num_pairs: int
    num_drafts: int
    num_accepted: int
    num_steps: int
    """That brought tokens behind the first one."""
    exact: bool


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run."""

    rows: list[Row]
    settings: dict[str, str | int]
    machine: Machine
    machine_at_end: Machine


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests that are alike, in groups that are sent at the same time."""

    name: str
    temperature: float
    groups: Sequence[Sequence[Ask]]


@dataclass(frozen=True, slots=True)
class Pair:
    """One group of requests, answered by plain decoding and by a method."""

    plain_speed: float
    speed: float
    answers: Sequence[Answer]
    is_exact: bool

    @classmethod
    def of(cls, plain: Sequence[Answer], guessed: Sequence[Answer]) -> Pair:
        is_exact = [answer.token_ids for answer in plain] == [answer.token_ids for answer in guessed]
        return cls(speed(plain), speed(guessed), guessed, is_exact)


def speed(answers: Sequence[Answer]) -> float:
    """Tokens a second: of one request behind its first arrival, of several all tokens over all time."""
    if len(answers) == 1 and answers[0].tokens_per_second is not None:
        return answers[0].tokens_per_second
    return sum(answer.num_tokens for answer in answers) / max(answer.seconds for answer in answers)


def ratio_of(pairs: Sequence[Pair]) -> float:
    """The method's median speed over that of plain decoding."""
    return median(pair.speed for pair in pairs) / median(pair.plain_speed for pair in pairs)


def row_of(traffic: str, method: str, pairs: Sequence[Pair]) -> Row:
    """What the pairs say together."""
    rng = random.Random(0)
    resampled = sorted(ratio_of(rng.choices(pairs, k=len(pairs))) for _ in range(NUM_RESAMPLED))
    answers = [answer for pair in pairs for answer in pair.answers]
    return Row(
        traffic=traffic,
        method=method,
        tokens_per_second=median(pair.speed for pair in pairs),
        plain_tokens_per_second=median(pair.plain_speed for pair in pairs),
        ratio=ratio_of(pairs),
        ratio_low=resampled[NUM_RESAMPLED // 20],
        ratio_high=resampled[-NUM_RESAMPLED // 20],
        num_pairs=len(pairs),
        num_drafts=sum(answer.num_drafts or 0 for answer in answers),
        num_accepted=sum(answer.num_accepted for answer in answers),
        num_steps=sum(answer.num_tokens - 1 - answer.num_accepted for answer in answers),
        exact=all(pair.is_exact for pair in pairs),
    )


def random_words(folder: Path, count: int, num_words: int) -> list[str]:
    """Prompts of words of the model's vocabulary, drawn one by one."""
    tokenizer = Tokenizer.load(folder)
    words = {tokenizer.decode([token_id]).strip() for token_id in range(tokenizer.vocab_size)}
    ordered = sorted(word for word in words if len(word) > 3 and word.isalpha())
    rng = random.Random(0)
    return [" ".join(rng.choices(ordered, k=num_words)) for _ in range(count)]


def traffics(arguments: argparse.Namespace, folder: Path) -> Iterator[Traffic]:
    """The kinds of traffic that were asked for."""
    prompter = Prompter(folder)
    questions = [question.turns[0] for question in read_questions(arguments.questions)]
    size, rounds = arguments.concurrency, arguments.rounds

    def asks(texts: Sequence[str]) -> list[Ask]:
        return [
            prompter.ask([text], [], num_tokens=arguments.max_tokens, seed=number) for number, text in enumerate(texts)
        ]

    if "random" in arguments.traffic:
        texts = random_words(folder, arguments.requests, 60)
        yield Traffic("random words", 0.0, [[ask] for ask in asks(texts)])
    if "hot" in arguments.traffic:
        texts = list(islice(cycle(questions), arguments.requests))
        yield Traffic("temperature 1.5", 1.5, [[ask] for ask in asks(texts)])
    if "many" in arguments.traffic:
        every = asks(list(islice(cycle(questions), size * rounds)))
        yield Traffic(f"{size} at a time", 0.0, [every[i * size : (i + 1) * size] for i in range(rounds)])


async def measure(service: ForerunService, traffic: Traffic, method: Method) -> Row:
    """Every group by both, in alternating order."""
    nonce = secrets.token_hex(8)
    pairs: list[Pair] = []
    for number, group in enumerate(traffic.groups):
        answers: dict[str, list[Answer]] = {}
        for each in (PLAIN, method) if number % 2 else (method, PLAIN):
            # No group has been there before under its salt, so that nobody learns an answer by heart.
            salt = f"{nonce} {each.label} {number if len(group) > 1 else ''}"
            system = ForerunMethod(service, each.label, each.speculation, temperature=traffic.temperature, salt=salt)
            answers[each.label] = await system.answer(group)
        pairs.append(Pair.of(answers[PLAIN.label], answers[method.label]))
        print(f"{traffic.name} {number + 1}/{len(traffic.groups)}: {ratio_of(pairs):.3f}", file=sys.stderr)
    return row_of(traffic.name, method.label, pairs)


def folder_of(engine: EngineSettings) -> Path:
    """Of the model that is served."""
    from speculation.assembly import model_folder

    return model_folder(engine.model, Path(engine.cache_dir).expanduser()).resolve()


async def run(arguments: argparse.Namespace) -> Report:
    """Start the service, measure, and stop it."""
    machine = describe_machine()
    flags = shlex.split(arguments.forerun_args)
    folder = folder_of(load_settings(flags, os.environ).engine)
    (method,) = read_methods(arguments.method)
    rows: list[Row] = []
    async with aiohttp.ClientSession() as session, running_service(flags, session) as service:
        for traffic in traffics(arguments, folder):
            first = Traffic("warm-up", traffic.temperature, traffic.groups[:1])
            await measure(service, first, method)
            rows.append(await measure(service, traffic, method))
    chosen = ("requests", "rounds", "concurrency", "max_tokens", "forerun_args")
    return Report(
        rows=rows,
        settings={"questions": arguments.questions.name, **{name: getattr(arguments, name) for name in chosen}},
        machine=machine,
        machine_at_end=describe_machine(),
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.never_slower", description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("--method", default="auto", help='what is measured against plain decoding: a name, or JSON (default: "auto")')
    add("--traffic", nargs="+", choices=("random", "hot", "many"), default=["random", "hot", "many"])
    add("--questions", type=Path, default=SMALL, help="JSON lines; without it the project's own few")
    add("--requests", type=int, default=40, help="requests of each kind that come one at a time")
    add("--rounds", type=int, default=12, help="batches of requests that come at the same time")
    add("--concurrency", type=int, default=32, help="requests of such a batch")
    add("--max-tokens", type=int, default=128, help="length of each answer")
    add("--forerun-args", default="", metavar="FLAGS", help='flags of the service, e.g. "--backend torch"')
    add("--json", type=Path, metavar="OUT", help="write the report there")
    return parser.parse_args(arguments)


def table(report: Report) -> Iterator[str]:
    """The report as people read it."""
    yield f"{'traffic':<18} {'method':<10} {'tokens/s':>9} {'plain':>9} {'ratio':>7} {'nine of ten':>13}  drafts  exact"
    for row in report.rows:
        interval = f"{row.ratio_low:.3f}-{row.ratio_high:.3f}"
        share = row.num_drafts / max(row.num_steps, 1)
        yield (
            f"{row.traffic:<18} {row.method:<10} {row.tokens_per_second:>9.1f} {row.plain_tokens_per_second:>9.1f} "
            f"{row.ratio:>7.3f} {interval:>13} {share:>7.1%}  {'yes' if row.exact else 'NO'}"
        )
    yield f"Load before and after: {report.machine.load_average}, {report.machine_at_end.load_average}"


def main() -> int:
    """Measure, print, write."""
    arguments = parse()
    try:
        report = termination.run(run(arguments))
    except (ValueError, OSError, RuntimeError) as error:
        print(f"benchmarks.never_slower: {error}", file=sys.stderr)
        return 2
    print("\n".join(table(report)))
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    return 0 if all(row.exact and row.ratio >= BOUND for row in report.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
