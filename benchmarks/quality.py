"""What quantising costs in quality: the native step, or fp8 through torch, against float32, on the model's own answers.

`python -m benchmarks.quality` answers questions greedily with the float32 torch path's quantised sibling, then lets
both read the same answers, and compares their next-token distributions position by position: how often the most likely
token is the same, and the mean Kullback-Leibler divergence from float32 (in nats).
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch

from benchmarks.conversation import Prompter
from benchmarks.questions import SMALL, read_questions, spread
from target.checkpoint import load_weights
from target.config import ModelConfig
from target.embedded import embedded_model_dir
from target.hf_config import read_config
from target.layout import BatchEntry, lay_out
from target.native.load import load_native_runner
from target.runner import Runner
from target.torch_runner import TorchRunner

BLOCK_SIZE = 16
MAX_PROMPT = 1000
"""Longer prompts are left out: they cost time and add no positions."""
ANSWER_TOKENS = 64
BARS = (0.965, 0.01)
"""Least agreement and most divergence of a quantisation that may be a default."""


class Quality(msgspec.Struct, frozen=True, kw_only=True):
    """One quantisation beside float32."""

    quantization: str
    description: str
    num_positions: int
    agreement: float
    """Share of positions whose most likely token is the same."""
    divergence: float
    """Mean KL(float32 || quantised), in nats."""
    passes: bool


def main() -> None:
    """See the module's docstring."""
    options = _options()
    folder = options.model or embedded_model_dir()
    config = read_config(folder)
    length = MAX_PROMPT + ANSWER_TOKENS
    num_blocks = 2 + length // BLOCK_SIZE
    prompts = _prompts(folder, options.questions)
    writer = load_native_runner(config, folder, num_blocks=num_blocks)
    texts = list(_answered(writer, config, prompts, options.positions))
    writer.close()
    reference = _torch_runner(folder, config, num_blocks, "none")
    expected = [_logits(reference, *text) for text in texts]
    results = []
    for quantization in options.quantization.split(","):
        if quantization == "fp8":
            results.append(_compared("fp8", _torch_runner(folder, config, num_blocks, "fp8"), texts, expected))
        else:
            runner = load_native_runner(config, folder, num_blocks=num_blocks, quantization=quantization)
            results.append(_compared(quantization, runner, texts, expected))
            runner.close()
        print(_line(results[-1]))
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(results)))


def _torch_runner(folder: Path, config: ModelConfig, num_blocks: int, quantization: str) -> TorchRunner:
    """In float32; 8-bit floats are multiplied by whatever torch has for this processor."""
    return TorchRunner(
        config,
        load_weights(folder, config, torch.float32),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_PROMPT + ANSWER_TOKENS,
        device=torch.device("cpu"),
        quantization=quantization,
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Quality of quantised weights beside float32.")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; the embedded model where absent")
    parser.add_argument("--questions", type=Path, default=SMALL, help="JSON lines of questions")
    parser.add_argument("--positions", type=int, default=1000, help="tokens of answers to compare at")
    parser.add_argument("--quantization", default="q4,int8,none", help="which, separated by commas; fp8 through torch")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    return parser.parse_args()


def _prompts(folder: Path, questions: Path) -> list[list[int]]:
    """First turns as token ids, spread over the categories."""
    prompter = Prompter(folder)
    found = read_questions(questions)
    asks = [prompter.ask(q.turns[:1], [], num_tokens=ANSWER_TOKENS, seed=0) for q in spread(found, len(found))]
    return [list(ask.token_ids) for ask in asks if len(ask.token_ids) <= MAX_PROMPT]


def _answered(
    runner: Runner, config: ModelConfig, prompts: Sequence[list[int]], num_positions: int
) -> Iterator[tuple[list[int], int]]:
    """Prompts with their greedy answers, and the length of each prompt, until there are enough answer tokens."""
    step = max(1, len(prompts) * ANSWER_TOKENS // num_positions)
    found = 0
    for prompt in itertools.chain(prompts[::step], *(prompts[i::step] for i in range(1, step))):
        answer: list[int] = []
        while len(answer) < min(ANSWER_TOKENS, num_positions - found):
            text = [*prompt, *answer]
            start = len(text) - 1 if answer else 0
            answer.append(int(_forward(runner, text, start)[-1].argmax()))
            if answer[-1] in config.eos_token_ids:
                break
        found += len(answer)
        yield [*prompt, *answer], len(prompt)
        if found >= num_positions:
            return


def _forward(runner: Runner, text: Sequence[int], start: int) -> torch.Tensor:
    """Logits [len(text) - start, vocabulary] of the tokens from `start` on, the others being in the cache."""
    entry = BatchEntry(start, text[start:], range(1, 2 + len(text) // BLOCK_SIZE), logits_from=0)
    return runner.forward(lay_out([entry], BLOCK_SIZE)).logits


def _logits(runner: Runner, text: Sequence[int], prompt_len: int) -> torch.Tensor:
    """Logits of the positions an answer's tokens were chosen at."""
    return _forward(runner, text[:-1], 0)[prompt_len - 1 :].clone()


def _compared(
    quantization: str, runner: Runner, texts: Sequence[tuple[list[int], int]], expected: Sequence[torch.Tensor]
) -> Quality:
    agreed, divergence, count = 0, 0.0, 0
    for text, reference in zip(texts, expected, strict=True):
        logits = _logits(runner, *text)
        ours, theirs = (x.double().log_softmax(dim=-1) for x in (logits, reference))
        agreed += int((logits.argmax(dim=-1) == reference.argmax(dim=-1)).sum())
        divergence += float((theirs.exp() * (theirs - ours)).sum())
        count += len(logits)
    agreement, divergence = agreed / count, divergence / count
    return Quality(
        quantization=quantization,
        description=runner.description,
        num_positions=count,
        agreement=agreement,
        divergence=divergence,
        passes=agreement >= BARS[0] and divergence <= BARS[1],
    )


def _line(quality: Quality) -> str:
    verdict = "passes" if quality.passes else f"does NOT reach agreement {BARS[0]:.1%} and divergence {BARS[1]}"
    return (
        f"{quality.quantization:5} {quality.num_positions} positions: argmax agreement {quality.agreement:.2%}, "
        f"KL {quality.divergence:.5f}, {verdict}\n      {quality.description}"
    )


if __name__ == "__main__":
    main()
