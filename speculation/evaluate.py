"""`forerun eval`: how often a head's or draft model's guesses are accepted, by position."""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from draft.config import SpeculationConfig
from draft.draft_model import DraftModelProposer
from draft.head_checkpoint import TargetTables
from draft.heads import HeadPlace, head_dtype, head_kind, load_head
from draft.proposer import Proposer
from draft.roster import Roster
from draft.tokenizer_match import require_same_tokenizer
from draft.training.prompts import ChatTokens, read_prompts
from speculation.controller import DraftLengthController
from speculation.cost_model import StepCostModel
from speculation.engine import Engine
from speculation.messages import RequestMetrics, SamplingParams, Submit
from speculation.progress import progress_bar
from target.embedded import embedded_model_dir
from target.fingerprint import model_fingerprint
from target.load import DTYPES, load_runner

BLOCK_SIZE = 16


@dataclass(slots=True)
class Tally:
    """What became of the drafts of some questions."""

    num_questions: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    histogram: list[int] = field(default_factory=list)
    """How many drafts had exactly so many tokens accepted."""

    def add(self, *, num_tokens: int, num_steps: int, histogram: Sequence[int]) -> None:
        """Count one question's answer."""
        self.num_questions += 1
        self.num_tokens += num_tokens
        self.num_steps += num_steps
        self.histogram += [0] * (len(histogram) - len(self.histogram))
        for accepted, count in enumerate(histogram):
            self.histogram[accepted] += count

    @property
    def by_position(self) -> list[float]:
        """Of all drafts, the share whose guess at each position was accepted."""
        num_drafts = max(sum(self.histogram), 1)
        return [sum(self.histogram[i:]) / num_drafts for i in range(1, len(self.histogram))]

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / drafts."""
        return 1.0 + sum(self.by_position)


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt, and what kind of question it is."""

    category: str
    token_ids: list[int]


def main(argv: Sequence[str] | None = None) -> int:
    """`forerun eval`: print acceptance by position and mean acceptance length, by category. 2 for bad input."""
    arguments = _parser().parse_args(argv)
    try:
        tallies = _run(arguments)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"forerun eval: {error}\n")
        return 2
    if arguments.json is not None:
        report = {name: asdict(tally) | {"by_position": tally.by_position} for name, tally in tallies.items()}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    sys.stdout.write("\n".join(table(tallies)) + "\n")
    return 0


def evaluate(
    engine: Engine, questions: Sequence[Question], config: SpeculationConfig, sampling: SamplingParams
) -> Iterator[tuple[Question, RequestMetrics, int]]:
    """Each question with what its answer cost and its number of tokens, in the order they end."""
    for number, question in enumerate(questions):
        request = Submit(
            request_id=str(number),
            prompt_token_ids=question.token_ids,
            sampling=msgspec.structs.replace(sampling, seed=sampling.seed + number),
            speculation=config,
        )
        refusal = engine.submit(request)
        if refusal is not None:
            raise ValueError(f"question {number + 1}: {refusal.message}")
    num_tokens: defaultdict[str, int] = defaultdict(int)
    while engine.has_work:
        for output in engine.step():
            num_tokens[output.request_id] += len(output.token_ids)
            if output.metrics is not None:
                yield questions[int(output.request_id)], output.metrics, num_tokens[output.request_id]


def table(tallies: Mapping[str, Tally]) -> Iterator[str]:
    """One line a category: questions, tokens a step, mean acceptance length, acceptance by position."""
    width = max(map(len, tallies))
    yield f"{'category'.ljust(width)}  questions  tokens/step  acceptance length  accepted by position"
    for name, tally in tallies.items():
        positions = " ".join(f"{value:.3f}" for value in tally.by_position)
        per_step = tally.num_tokens / max(tally.num_steps, 1)
        yield (
            f"{name.ljust(width)}  {tally.num_questions:9}  {per_step:11.3f}  {tally.mean_acceptance_length:17.3f}  "
            f"{positions}"
        )


def _run(arguments: argparse.Namespace) -> dict[str, Tally]:
    target_dir = embedded_model_dir() if arguments.target == "embedded" else Path(arguments.target).expanduser()
    tables = TargetTables.of(target_dir)
    method = head_kind(arguments.draft)
    chat = ChatTokens(target_dir)
    questions = _questions(chat, arguments.questions)[:: arguments.every]
    length = max(len(question.token_ids) for question in questions) + arguments.max_tokens + 64
    num_blocks = 1 + arguments.concurrency * -(-length // BLOCK_SIZE)
    load = partial(
        load_runner,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        device=arguments.device,
        dtype=arguments.dtype,
        backend=arguments.backend,
        quantization=arguments.quantization,
    )
    runner = load(target_dir)
    if method == "draft_model":
        require_same_tokenizer(target_dir, arguments.draft)
        proposer: Proposer = DraftModelProposer(
            load(arguments.draft),
            model_fingerprint=str(arguments.draft),
            vocab_size=tables.config.vocab_size,
            eos_token_ids=tables.config.eos_token_ids,
        )
    else:
        is_auto = arguments.dtype == "auto"
        place = HeadPlace(
            runner.device,
            head_dtype(runner.device) if is_auto else DTYPES[arguments.dtype],
            num_blocks,
            BLOCK_SIZE,
            is_native=is_auto and arguments.backend != "torch" and runner.device.type == "cpu",
            shift_layers=arguments.shift_layers,
        )
        proposer = load_head(arguments.draft, tables, place)
    fields = {
        "method": method,
        "num_speculative_tokens": arguments.num_speculative_tokens,
        "tree_size": arguments.tree_size or "auto",
    }
    config: SpeculationConfig = msgspec.convert(fields, type=SpeculationConfig)
    engine = Engine(
        runner,
        Roster({method: proposer}),
        DraftLengthController(StepCostModel()),
        model_fingerprint=model_fingerprint(target_dir, dtype=arguments.dtype, quantization=arguments.quantization),
        default_config=config,
        max_num_seqs=arguments.concurrency,
        max_num_batched_tokens=512,
        max_waiting=len(questions),
    )
    sampling = SamplingParams(temperature=arguments.temperature, seed=arguments.seed, max_tokens=arguments.max_tokens)
    total = Tally()
    tallies: defaultdict[str, Tally] = defaultdict(Tally)
    with progress_bar("questions", len(questions)) as bar:
        for question, metrics, num_tokens in evaluate(engine, questions, config, sampling):
            for tally in (tallies[question.category], total):
                tally.add(num_tokens=num_tokens, num_steps=metrics.num_steps, histogram=metrics.accepted_histogram)
            bar.update(1)
            bar.set_postfix_str(f"acceptance length {total.mean_acceptance_length:.3f}")
    return dict(sorted(tallies.items())) | {"all": total}


def _questions(chat: ChatTokens, path: Path) -> list[Question]:
    """The prompts of a file, with the `category` of lines that name one."""
    prompts = read_prompts(path)
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    categories = [_category(line) for line in lines]
    return [
        Question(category, chat.conversation(messages)) for category, messages in zip(categories, prompts, strict=True)
    ]


def _category(line: str) -> str:
    fields = json.loads(line) if line.lstrip().startswith("{") else {}
    return str(fields.get("category", "questions"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="forerun eval", description="How often the guesses of a head or a draft model are accepted, by position."
    )
    parser.add_argument("--target", default="embedded", help='a Hugging Face folder, or "embedded" (default: embedded)')
    parser.add_argument("--draft", type=Path, required=True, help="the folder of a head or of a draft model")
    parser.add_argument("--questions", type=Path, required=True, help="one prompt a line, as for forerun train")
    parser.add_argument("--every", type=int, default=1, help="ask every n-th question only (default: %(default)s)")
    parser.add_argument("--num-speculative-tokens", type=int, default=4, help="depth of a draft (default: %(default)s)")
    parser.add_argument("--tree-size", type=int, help="nodes of a draft tree (default: unset, drafts are chains)")
    parser.add_argument(
        "--max-tokens", type=int, default=128, help="maximum tokens of an answer (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="sampling temperature; 0 is greedy (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of each answer (default: %(default)s)")
    parser.add_argument(
        "--concurrency", type=int, default=8, help="questions answered at a time (default: %(default)s)"
    )
    parser.add_argument(
        "--shift-layers",
        type=int,
        default=0,
        help="added to the layers that an EAGLE-3 head reads (default: %(default)s)",
    )
    parser.add_argument("--device", default="auto", help="device, such as cpu or cuda:0 (default: %(default)s)")
    parser.add_argument(
        "--dtype",
        default="auto",
        help="number format of the target: auto, float32, bfloat16 or float16 (default: %(default)s)",
    )
    parser.add_argument(
        "--backend", default="auto", help="code that runs the target, as in serve --help (default: %(default)s)"
    )
    parser.add_argument(
        "--quantization",
        default="auto",
        help="how the target's weights are stored, as in serve --help (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, help="write the numbers there, too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
