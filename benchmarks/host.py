"""What the host does for a step, in microseconds: what a device has to wait for, and what hides behind its work.

`python -m benchmarks.host` drives the engine with a device that takes no time: its forwards only plan their attention,
as the Triton path does, and their logits are ready. Between the last token of a step and the first kernel of the next
stand settling the step and planning the next one; reporting and sending happen while the device works. Lookup drafts
are always right here. Figures are medians.
"""

from __future__ import annotations

import argparse
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import torch

from benchmarks.machine import Machine, describe_machine
from draft.config import NgramConfig, NoSpeculation, SpeculationConfig
from draft.registry import lookup_proposers
from draft.roster import Roster
from speculation.controller import DraftLengthController
from speculation.cost_model import StepCostModel
from speculation.engine import Engine
from speculation.framing import encode_frame
from speculation.messages import StepOutputs, Submit
from target.batch import ForwardBatch, ForwardOutput
from target.config import ModelConfig
from target.sampling_params import SamplingParams
from target.triton.attention_work import WorkShape, plan_work

PERIOD = 37
"""The model says the numbers below it in turn, so that lookups find what comes."""
PROMPT_TOKENS = 512
WARM_UP = 30
CONFIGS: dict[str, SpeculationConfig] = {"none": NoSpeculation(), "ngram, k = 4": NgramConfig(num_speculative_tokens=4)}


class HostTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds of a step's parts."""

    batch: int
    method: str
    settle: float
    """From the target's tokens to sequences that have them."""
    plan: float
    """Drafting, scheduling, laying out."""
    attention: float
    """The plan of the forward's attention."""
    sample: float
    """Asking for the choice of tokens, while a device would compute the logits."""
    report: float
    """Counting, wording, encoding and sending."""

    @property
    def waited_for(self) -> float:
        """What a device waits for between two steps."""
        return self.settle + self.plan + self.attention


class HostReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a run found."""

    machine: Machine
    steps: list[HostTimes]


class NoBlocks:
    """A KV pool that holds nothing."""

    num_blocks, block_size = 8192, 16

    def move(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        pass


class NoModel:
    """Computes nothing, and notes when it was asked."""

    config = ModelConfig(
        vocab_size=1024,
        hidden_size=16,
        intermediate_size=16,
        num_layers=1,
        num_heads=32,
        num_kv_heads=8,
        head_size=128,
        max_model_len=8192,
    )
    kv_pool = NoBlocks()
    device = torch.device("cpu")
    description = "a device that takes no time"

    def __init__(self) -> None:
        self._logits = torch.zeros(4096, self.config.vocab_size)
        self._shape = WorkShape(tile_rows=4, split=256, max_pieces=1 << 14)
        self.asked = self.planned = self.done = 0.0

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """See `target.runner.Runner.forward`."""
        self.asked = time.perf_counter()
        num_rows = -(-len(batch.token_ids) // 16) * 16
        plan_work(batch, num_rows, front=np.zeros(3 * num_rows, np.int64), window=None, shape=self._shape)
        self.planned = time.perf_counter()
        logits = self._logits[: len(batch.logit_rows)].zero_()
        following = torch.from_numpy((batch.token_ids[batch.logit_rows] + 1) % PERIOD)
        logits.scatter_(1, following[:, None], 1.0)
        self.done = time.perf_counter()
        return ForwardOutput(logits)


def measure(batch: int, method: str, num_steps: int) -> HostTimes:
    """Steps of `batch` decoding sequences."""
    model = NoModel()
    engine = Engine(
        model,
        Roster(lookup_proposers(1 << 16)),
        DraftLengthController(StepCostModel()),
        model_fingerprint="none",
        default_config=CONFIGS[method],
        max_num_seqs=batch,
        max_num_batched_tokens=8192,
        max_waiting=batch,
    )
    for i in range(batch):
        refused = engine.submit(
            Submit(
                request_id=f"request-{i}",
                prompt_token_ids=[(i + j) % PERIOD for j in range(PROMPT_TOKENS)],
                sampling=SamplingParams(temperature=0.0, max_tokens=5 * (WARM_UP + num_steps), ignore_eos=True),
                cache_salt=str(i),
            )
        )
        assert refused is None, refused
    ours, theirs = socket.socketpair()
    with ours, theirs:
        parts = []
        for _ in range(WARM_UP + num_steps):
            parts.append(_timed_step(engine, model, ours))
            theirs.recv(1 << 20)  # the front is another process
    settle, plan, attention, sample, report = (
        round(1e6 * median(values), 1) for values in zip(*parts[WARM_UP:], strict=True)
    )
    return HostTimes(
        batch=batch, method=method, settle=settle, plan=plan, attention=attention, sample=sample, report=report
    )


def _timed_step(engine: Engine, model: NoModel, connection: socket.socket) -> tuple[float, ...]:
    """Seconds of settling, planning, planning attention, asking for tokens, reporting."""
    started = time.perf_counter()
    step = engine.launch()
    launched = time.perf_counter()
    result = engine.settle(step)
    settled = time.perf_counter()
    connection.sendall(encode_frame(StepOutputs(engine.report(result))))
    told = time.perf_counter()
    return (
        settled - launched,
        model.asked - started,
        model.planned - model.asked,
        launched - model.done,
        told - settled,
    )


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description=__doc__)
    parser.add_argument("--batches", default="1,8,32", help="numbers of sequences, separated by commas")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = describe_machine()
    steps = [measure(int(batch), method, options.steps) for batch in options.batches.split(",") for method in CONFIGS]
    print(f"{'':22}{'settle':>9}{'plan':>9}{'attention':>11}{'waited for':>12} |{'sample':>9}{'report':>9}   µs a step")
    for one in steps:
        print(
            f"{one.batch:3} x {one.method:16}{one.settle:9.0f}{one.plan:9.0f}{one.attention:11.0f}"
            f"{one.waited_for:12.0f} |{one.sample:9.0f}{one.report:9.0f}"
        )
    print(f"{machine.processor}, load {machine.load_average}")
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(HostReport(machine=machine, steps=steps))))


if __name__ == "__main__":
    main()
