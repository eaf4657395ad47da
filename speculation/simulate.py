"""Replays recorded sequences through any model-free proposer, without a target.

The target's tokens do not depend on what was guessed, so a record of them replays exactly: which guesses would have
been accepted, in how many steps, and, by the step-cost model, how long it would have taken.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import cast

import msgspec

from draft.config import (
    MODEL_FREE_METHODS,
    MODEL_METHODS,
    NoSpeculation,
    SpeculationConfig,
    resolve,
)
from draft.proposer import DraftContext, Proposer
from draft.registry import lookup_proposers
from draft.roster import Roster
from draft.tree import Draft
from speculation.controller import DraftLengthController
from speculation.cost_model import StepCostModel, StepLoad
from speculation.recording import Recording, read_log
from target.sampling_params import SamplingParams

DEFAULT_CURVE = "1:4.3,3:6,5:8,8:12,16:21"
"""Milliseconds by rows: the embedded model in one native call on two cores."""
SIMULATED_METHODS = (*MODEL_FREE_METHODS, "first", "auto", "none")
MAX_PRINTED_POSITIONS = 8


@dataclass(slots=True)
class Replay:
    """What one config would have done with a log."""

    num_sequences: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    """Summed over sequences; steps that a batch shares count for each."""
    num_drafts: int = 0
    num_draft_tokens: int = 0
    drafted_per_position: Counter[int] = field(default_factory=Counter)
    """Drafts that reached so deep, the first guess being at 1."""
    accepted_per_position: Counter[int] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    """By the cost model, and the time the proposers really took."""
    drafting_seconds: float = 0.0

    @property
    def num_accepted(self) -> int:
        return self.accepted_per_position.total()

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted tokens a draft."""
        return 1 + self.num_accepted / self.num_drafts if self.num_drafts else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted tokens."""
        return self.num_accepted / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def tokens_per_step(self) -> float:
        return self.num_tokens / self.num_steps if self.num_steps else 0.0

    def acceptance_at(self, position: int) -> float:
        """Share of the drafts that reached `position` (from 1) whose guess there was accepted."""
        drafted = self.drafted_per_position[position]
        return self.accepted_per_position[position] / drafted if drafted else 0.0

    def note(self, draft: Draft, path: Sequence[int]) -> None:
        """One sequence's step."""
        self.num_steps += 1
        if not draft:
            self.skipped[draft.skipped or ""] += 1
            return
        self.num_drafts += 1
        self.num_draft_tokens += len(draft)
        self.drafted_per_position.update(range(1, max(draft.depths) + 1))
        self.accepted_per_position.update(range(1, len(path) + 1))


@dataclass(slots=True)
class _Running:
    """One recorded sequence while it is replayed."""

    seq_id: int
    recording: Recording
    config: SpeculationConfig
    token_ids: list[int]

    @property
    def num_left(self) -> int:
        """Tokens that the target will still say."""
        return len(self.recording.prompt_token_ids) + len(self.recording.output_token_ids) - len(self.token_ids)

    @property
    def rest(self) -> list[int]:
        """What the target will say."""
        return self.recording.output_token_ids[len(self.token_ids) - len(self.recording.prompt_token_ids) :]

    @property
    def context(self) -> DraftContext:
        sampling = SamplingParams(temperature=self.recording.temperature)
        prompt_length = len(self.recording.prompt_token_ids)
        return DraftContext(
            self.seq_id, self.token_ids, prompt_length, sampling, self.config, self.recording.cache_salt
        )


class Simulator:
    """An engine without a model: the same roster, controller and steps, over tokens that are known.

    Its first step of a sequence yields the first token without a guess, as a prompt's last chunk does; prompts cost
    nothing, since they cost every config the same.
    """

    def __init__(
        self,
        costs: StepCostModel,
        proposers: Mapping[str, Proposer] | None = None,
        *,
        num_concurrent: int = 1,
        known: StepCostModel | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """`costs` says how long steps take, and `known`, if given, what the controller thinks at first.

        `proposers`: all lookups if None.
        """
        self._costs = costs
        self._roster = Roster(lookup_proposers() if proposers is None else proposers, clock=clock)
        self._control = DraftLengthController(costs if known is None else known)
        self._num_concurrent = num_concurrent
        self._clock = clock
        self._num_started = 0

    def run(self, recordings: Iterable[Recording], config: SpeculationConfig) -> Replay:
        """Replay all, `num_concurrent` at a time. Raises ValueError for methods that need a model."""
        replay, running, waiting = Replay(), list[_Running](), iter(recordings)
        while True:
            while len(running) < self._num_concurrent and (recording := next(waiting, None)) is not None:
                replay.num_sequences += 1
                replay.num_tokens += len(recording.output_token_ids)
                if len(recording.output_token_ids) > 1:
                    running.append(self._start(recording, config))
            if not running:
                return replay
            self._step(running, replay)
            for sequence in [sequence for sequence in running if not sequence.num_left]:
                running.remove(sequence)
                self._roster.finish(sequence.seq_id)
                self._control.finish(sequence.seq_id)

    def _start(self, recording: Recording, config: SpeculationConfig) -> _Running:
        self._num_started += 1
        has_prediction = bool(recording.prediction_token_ids)
        config = resolve(config, self._roster.methods, has_prediction=has_prediction)
        sequence = _Running(self._num_started, recording, config, list(recording.prompt_token_ids))
        self._roster.start(
            sequence.seq_id,
            config,
            sequence.token_ids,
            cache_salt=recording.cache_salt,
            prediction=recording.prediction_token_ids,
        )
        self._commit(sequence, 1)
        return sequence

    def _step(self, running: Sequence[_Running], replay: Replay) -> None:
        started = self._clock()
        num_context_tokens = sum(len(sequence.token_ids) for sequence in running)
        load = StepLoad(len(running), num_context_tokens, num_context_tokens)
        self._control.begin(load)
        drafts = self._draft(running)
        drafting_seconds = self._clock() - started
        self._control.note_all_drafting(drafting_seconds)
        num_tokens = 0
        for sequence in running:
            draft = drafts[sequence.seq_id]
            path = follow(draft, sequence.rest)
            replay.note(draft, path)
            self._control.observe(sequence.seq_id, draft, path)
            load = load.plus(len(draft), len(draft) * len(sequence.token_ids))
            num_tokens += len(path) + 1
            self._commit(sequence, len(path) + 1)
        seconds = self._costs.seconds(load)
        self._control.end(load, num_tokens=num_tokens, seconds=seconds, is_pure=True)
        replay.seconds += seconds + drafting_seconds
        replay.drafting_seconds += drafting_seconds

    def _draft(self, running: Sequence[_Running]) -> dict[int, Draft]:
        drafts: dict[int, Draft] = {}
        contexts: list[DraftContext] = []
        most: list[int] = []
        for sequence in running:
            if sequence.num_left <= 1:
                drafts[sequence.seq_id] = Draft.none("last_token")
            elif self._control.rests(sequence.seq_id):
                drafts[sequence.seq_id] = Draft.none("does_not_pay")
            else:
                contexts.append(sequence.context)
                most.append(sequence.num_left - 1)
        proposed = self._control.trim(contexts, self._roster.propose(contexts, most, self._control))
        drafts.update((context.seq_id, draft) for context, draft in zip(contexts, proposed, strict=True))
        return drafts

    def _commit(self, sequence: _Running, num_tokens: int) -> None:
        token_ids = sequence.rest[:num_tokens]
        sequence.token_ids += token_ids
        self._roster.commit(sequence.seq_id, token_ids, None)


def follow(draft: Draft, token_ids: Sequence[int]) -> tuple[int, ...]:
    """The nodes of `draft` that lie on the path `token_ids`, root first: what the target would accept."""
    path: list[int] = []
    children = {
        (parent, token_id): node
        for node, (parent, token_id) in reversed(list(enumerate(zip(draft.parents, draft.token_ids, strict=True))))
    }
    parent = -1
    for token_id in token_ids:
        node = children.get((parent, token_id))
        if node is None:
            break
        path.append(node)
        parent = node
    return tuple(path)


def parse_config(text: str) -> SpeculationConfig:
    """A config as a user types it: a method's name, or the JSON object. Raises ValueError for methods with a model."""
    try:
        value = json.loads(text) if text.lstrip().startswith("{") else {"method": text}
        _check_method(value)
        return resolve(msgspec.convert(value, type=SpeculationConfig), {*MODEL_FREE_METHODS})
    except ValueError as error:  # msgspec's and json's among them
        raise ValueError(f"config {text!r}: {error}") from error


def _check_method(value: object) -> None:
    """Raises ValueError for a method that does not exist, and for one that needs a model and so cannot be simulated."""
    method = value.get("method") if isinstance(value, dict) else None
    known = ", ".join(SIMULATED_METHODS)
    if method in MODEL_METHODS:
        raise ValueError(f"method {method!r} needs a model and cannot be simulated; one of {known}")
    if isinstance(method, str) and method not in SIMULATED_METHODS:
        raise ValueError(f"method {method!r} is unknown; one of {known}")


def parse_curve(text: str) -> StepCostModel:
    """A step-cost model from "rows:milliseconds,…". Raises ValueError for anything else."""
    samples: list[tuple[StepLoad, float]] = []
    for part in text.split(","):
        rows, _, milliseconds = part.partition(":")
        try:
            samples.append((StepLoad(int(rows)), float(milliseconds) / 1000))
        except ValueError as error:
            raise ValueError(f"cost curve has {part!r}; write rows:milliseconds,… as in {DEFAULT_CURVE}") from error
    if min(load.num_rows for load, _ in samples) < 1 or min(seconds for _, seconds in samples) <= 0:
        raise ValueError(f"cost curve is {text!r}; rows and milliseconds must be positive")
    costs = StepCostModel()
    costs.calibrate(samples)
    return costs


def simulate(
    recordings: Sequence[Recording],
    configs: Mapping[str, SpeculationConfig],
    curve: str = DEFAULT_CURVE,
    *,
    num_concurrent: int = 1,
) -> dict[str, Replay]:
    """One replay a config, by the names given, and plain decoding as "none". Each starts from nothing."""
    return {
        name: Simulator(parse_curve(curve), num_concurrent=num_concurrent).run(recordings, config)
        for name, config in {"none": NoSpeculation(), **configs}.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    """`forerun simulate`: print what each config would have done with a log. 2 for bad input."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.concurrency < 1:
            raise ValueError(f"--concurrency is {arguments.concurrency}; it must be at least 1")
        configs = {text: parse_config(text) for text in arguments.config}
        recordings = [recording for path in arguments.log for recording in read_log(path)]
        replays = simulate(recordings, configs, arguments.cost_curve, num_concurrent=arguments.concurrency)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"forerun simulate: {error}\n")
        return 2
    plain = replays["none"]
    report = [_row(name, replay, plain) for name, replay in replays.items()]
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": report}, indent=2) + "\n")
    sys.stdout.write("\n".join(_table(report)) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="forerun simulate",
        description="Replay recorded token sequences through lookup proposers, without a model.",
    )
    parser.add_argument(
        "--log",
        type=Path,
        action="append",
        required=True,
        help="JSON lines of prompt_token_ids and output_token_ids; of several the oldest first",
    )
    parser.add_argument(
        "--config",
        action="append",
        required=True,
        help='a method, or JSON like {"method": "suffix", "tree_size": 12}; give it several times to compare',
    )
    parser.add_argument(
        "--cost-curve", default=DEFAULT_CURVE, help="a step's milliseconds by number of rows (default: %(default)s)"
    )
    parser.add_argument(
        "--concurrency", type=int, default=1, help="sequences replayed at a time, at least 1 (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="write the table there, too")
    return parser


def _row(name: str, replay: Replay, plain: Replay) -> dict[str, object]:
    deepest = max(replay.drafted_per_position, default=0)
    return {
        "config": name,
        "sequences": replay.num_sequences,
        "tokens": replay.num_tokens,
        "steps": replay.num_steps,
        "drafts": replay.num_drafts,
        "draft_tokens": replay.num_draft_tokens,
        "tokens_per_step": round(replay.tokens_per_step, 3),
        "mean_acceptance_length": round(replay.mean_acceptance_length, 3),
        "acceptance_rate": round(replay.acceptance_rate, 3),
        "acceptance_per_position": [round(replay.acceptance_at(position), 3) for position in range(1, deepest + 1)],
        "skipped_drafts": dict(replay.skipped),
        "seconds": round(replay.seconds, 6),
        "drafting_seconds": round(replay.drafting_seconds, 6),
        "speedup": round(plain.seconds / replay.seconds, 3) if replay.seconds else 1.0,
    }


def _table(rows: Sequence[Mapping[str, object]]) -> Iterator[str]:
    columns = ("tokens", "steps", "tokens_per_step", "mean_acceptance_length", "acceptance_rate", "speedup")
    width = max(len("config"), *(len(str(row["config"])) for row in rows))
    yield "  ".join(["config".ljust(width), *columns])
    for row in rows:
        cells = [str(row[column]).rjust(len(column)) for column in columns]
        yield "  ".join([str(row["config"]).ljust(width), *cells])
    positions = range(1, MAX_PRINTED_POSITIONS + 1)
    yield ""
    yield "  ".join(
        ["acceptance by position".ljust(max(width, 22)), *(str(position).rjust(5) for position in positions)]
    )
    for row in rows:
        rates = cast("list[float]", row["acceptance_per_position"])[:MAX_PRINTED_POSITIONS]
        yield "  ".join([str(row["config"]).ljust(max(width, 22)), *(f"{rate:5.2f}" for rate in rates)])
    yield ""
    for row in rows:
        skipped = cast("dict[str, int]", row["skipped_drafts"])
        reasons = ", ".join(f"{reason or 'no draft'} {count}" for reason, count in skipped.items())
        yield f"{row['config']}: steps without a draft: {reasons or '0'}"


if __name__ == "__main__":
    sys.exit(main())
