"""What guessing costs: microseconds a step and sequence, of each lookup and of the controller around it.

    python -m benchmarks.proposers [--prompt-tokens 2000] [--steps 400] [--concurrency 1] [--json OUT]

Text is made of pieces that recur, so that about half of all steps find something. Times are of the thread's own CPU
time; a proposer has a twentieth of a millisecond. The first step of a sequence, which indexes its prompt, is apart.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from time import thread_time

from draft.config import NgramConfig, PredictionConfig, SingleConfig, SuffixConfig
from draft.proposer import DraftContext
from draft.registry import lookup_proposers
from draft.roster import AsConfigured, DraftControl, Roster
from speculation.controller import DraftLengthController
from speculation.cost_model import StepLoad
from speculation.simulate import DEFAULT_CURVE, parse_curve
from target.sampling_params import SamplingParams

CONFIGS: dict[str, SingleConfig] = {
    "ngram": NgramConfig(),
    "suffix": SuffixConfig(),
    "suffix chain 4": SuffixConfig(num_speculative_tokens=4),
    "prediction": PredictionConfig(),
}


def recurring(rng: random.Random, num_tokens: int) -> list[int]:
    """Tokens of which half are pieces of what came before."""
    text = [rng.randrange(40_000) for _ in range(50)]
    while len(text) < num_tokens:
        if rng.random() < 0.5:
            start = rng.randrange(len(text) - 12)
            text += text[start : start + rng.randrange(4, 12)]
        else:
            text += [rng.randrange(40_000) for _ in range(8)]
    return text[:num_tokens]


def step_times(
    config: SingleConfig,
    control: DraftControl | DraftLengthController,
    *,
    num_prompt: int,
    num_steps: int,
    batch: int,
) -> Iterator[float]:
    """CPU seconds of each step for all sequences together: propose, and trim where a controller does, then commit."""
    rng = random.Random(0)
    roster = Roster(lookup_proposers())
    texts = [recurring(rng, num_prompt + 2 * num_steps) for _ in range(batch)]
    for seq_id, text in enumerate(texts):
        roster.start(seq_id, config, text[:num_prompt], prediction=text[num_prompt:])
    for length in range(num_prompt, num_prompt + 2 * num_steps, 2):
        contexts = [
            DraftContext(i, text[:length], num_prompt, SamplingParams(), config) for i, text in enumerate(texts)
        ]
        started = thread_time()
        if isinstance(control, DraftLengthController):
            control.begin(StepLoad(batch, batch * length, batch * length))
        drafts = roster.propose(contexts, [63] * batch, control)
        if isinstance(control, DraftLengthController):
            control.trim(contexts, drafts)
        for seq_id, text in enumerate(texts):
            roster.commit(seq_id, text[length : length + 2], None)
        yield thread_time() - started


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.proposers", description=__doc__)
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    rows = []
    print(f"{'config':16}{'control':14}{'first':>10}{'median':>10}{'worst':>10}   microseconds a step and sequence")
    for name, config in CONFIGS.items():
        for label, control in (
            ("as configured", AsConfigured()),
            ("controller", DraftLengthController(parse_curve(DEFAULT_CURVE))),
        ):
            sizes = {
                "num_prompt": arguments.prompt_tokens,
                "num_steps": arguments.steps,
                "batch": arguments.concurrency,
            }
            first, *rest = (1e6 * seconds / arguments.concurrency for seconds in step_times(config, control, **sizes))
            print(f"{name:16}{label:14}{first:10.0f}{median(rest):10.1f}{max(rest):10.1f}")
            rows.append({"config": name, "control": label, "first": first, "median": median(rest), "worst": max(rest)})
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
