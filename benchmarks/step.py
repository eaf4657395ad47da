"""What a step of the native runner costs, by its number of tokens, beside what memory alone would take.

`python -m benchmarks.step` times, in turns so that a busy moment hits all alike: reading a buffer as large as the
weights on the same threads (the floor of any step), verify steps of 1 to 16 tokens of one sequence, a step of 16
sequences, a prefill, and the sampling of rows. Figures are medians.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median

import msgspec
import numba
import numpy as np
import numpy.typing as npt
import torch

from benchmarks.machine import Machine, describe_machine
from target.batch import ForwardBatch
from target.embedded import embedded_model_dir
from target.hf_config import read_config
from target.layout import BatchEntry, lay_out
from target.native.load import load_native_runner
from target.native.memory import Arena
from target.native.runner import NativeRunner
from target.sampling import SamplingRow, sample
from target.sampling_params import SamplingParams

BLOCK_SIZE = 16
VERIFY_TOKENS = (1, 2, 3, 4, 5, 8, 12, 16)
NUM_SEQUENCES = 16
PREFILL_TOKENS = 500
BARS = {3: 1.4, 5: 2.0}
"""Most that a step of so many tokens may cost, in steps of one token."""
FLOOR_BAR = 1.6
"""Most that a step of one token may cost, in floors."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of step."""

    name: str
    ms: float
    per_single: float | None = None
    """In steps of one token."""
    tokens_per_second: float | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One quantisation and instruction set."""

    description: str
    context: int
    weight_megabytes: float
    read_gigabytes_per_second: float
    floor_ms: float
    single_per_floor: float
    timings: list[Timing]
    machine: Machine


def main() -> None:
    """See the module's docstring."""
    options = _options()
    folder = options.model or embedded_model_dir()
    reports = []
    for quantization in options.quantization.split(","):
        runner = load_native_runner(
            read_config(folder),
            folder,
            num_blocks=(NUM_SEQUENCES + 2) * (options.context + PREFILL_TOKENS) // BLOCK_SIZE,
            quantization=quantization,
            num_threads=options.threads,
            isa=options.isa,
        )
        reports.append(_measured(runner, options.context, options.rounds, options.threads))
        runner.close()
        _print(reports[-1])
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(reports)))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The cost of a native step by its number of tokens.")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; the embedded model where absent")
    parser.add_argument("--quantization", default="q4", help="q4, int8, none, several separated by commas")
    parser.add_argument("--isa", default="auto", help="instruction set: auto, avx2, avx_vnni, avx512_vnni")
    parser.add_argument("--context", type=int, default=300, help="tokens before the step")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40, help="repetitions of everything, in turns")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    return parser.parse_args()


def _measured(runner: NativeRunner, context: int, rounds: int, num_threads: int) -> Report:
    machine = describe_machine()
    actions: dict[str, Callable[[], object]] = {"floor": _Floor(runner.weight_bytes, num_threads).seconds}
    for num_tokens in VERIFY_TOKENS:
        batch = _steps(runner, 1, context, num_tokens)
        actions[f"1 x {num_tokens}"] = partial(runner.forward, batch)
    many = _steps(runner, NUM_SEQUENCES, context, 1)
    actions[f"{NUM_SEQUENCES} x 1"] = partial(runner.forward, many)
    prefill = _steps(runner, 1, 0, PREFILL_TOKENS, all_logits=False)
    actions[f"prefill {PREFILL_TOKENS}"] = partial(runner.forward, prefill)
    actions |= _sampling(runner.forward(_steps(runner, 1, context, 1)).logits)
    seconds = _in_turns(actions, rounds)
    single = seconds["1 x 1"]
    return Report(
        description=runner.description,
        context=context,
        weight_megabytes=runner.weight_bytes / 1e6,
        read_gigabytes_per_second=runner.weight_bytes / seconds["floor"] / 1e9,
        floor_ms=1e3 * seconds["floor"],
        single_per_floor=single / seconds["floor"],
        timings=[_timing(name, value, single) for name, value in seconds.items() if name != "floor"],
        machine=machine,
    )


def _timing(name: str, seconds: float, single: float) -> Timing:
    kind, _, size = name.partition(" ")
    if kind == "prefill":
        return Timing(name=name, ms=1e3 * seconds, tokens_per_second=int(size) / seconds)
    if kind == "1":
        return Timing(name=name, ms=1e3 * seconds, per_single=seconds / single)
    rows = int(kind) if kind.isdigit() else None
    return Timing(name=name, ms=1e3 * seconds, tokens_per_second=rows and rows / seconds)


def _in_turns(actions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The median seconds of each action: those it returns, or those it takes."""
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds + 1):
        for name, action in actions.items():
            started = time.perf_counter()
            result = action()
            elapsed = time.perf_counter() - started
            seconds[name].append(result if isinstance(result, float) else elapsed)
    return {name: median(values[1:]) for name, values in seconds.items()}


def _steps(
    runner: NativeRunner, num_sequences: int, context: int, num_tokens: int, *, all_logits: bool = True
) -> ForwardBatch:
    """A batch of sequences whose context has been computed, each with `num_tokens` new tokens."""
    rng = np.random.default_rng(0)
    num_blocks = -(-(context + num_tokens) // BLOCK_SIZE)
    entries = []
    for i in range(num_sequences):
        # A phrase that repeats, so that the model is as sure of what follows as it is in ordinary text.
        phrase = rng.integers(0, runner.config.vocab_size, 20).tolist()
        ids = (phrase * (1 + (context + num_tokens) // 20))[: context + num_tokens]
        blocks = range(1 + i * num_blocks, 1 + (i + 1) * num_blocks)
        if context:
            runner.forward(lay_out([BatchEntry(0, ids[:context], blocks)], BLOCK_SIZE))
        entries.append(BatchEntry(context, ids[context:], blocks, logits_from=0 if all_logits else num_tokens - 1))
    return lay_out(entries, BLOCK_SIZE)


def _sampling(logits: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Choosing one token from a model's own logits."""
    kinds = {
        "greedy": SamplingParams(temperature=0.0),
        "temperature 1": SamplingParams(seed=1),
        "top_p 0.9": SamplingParams(seed=1, temperature=0.8, top_p=0.9),
    }
    return {f"sample {name}": partial(_sample_warm, logits, [SamplingRow(params, 7)]) for name, params in kinds.items()}


def _sample_warm(logits: torch.Tensor, rows: list[SamplingRow]) -> float:
    """Seconds to sample logits that are in the processor's caches, as they are behind a step."""
    sample(logits, rows)
    started = time.perf_counter()
    sample(logits, rows)
    return time.perf_counter() - started


class _Floor:
    """Reads so many bytes of large pages on so many threads."""

    def __init__(self, num_bytes: int, num_threads: int) -> None:
        buffer = Arena(num_bytes).empty((num_bytes // 8,), np.int64)
        buffer[...] = 1
        self._parts: Sequence[npt.NDArray[np.generic]] = np.array_split(buffer, num_threads)
        self._pool = ThreadPoolExecutor(num_threads)
        self._together = threading.Barrier(num_threads)
        self.seconds()

    def seconds(self) -> float:
        """How long the slowest thread read, waking not counted."""
        return max(self._pool.map(self._read_part, self._parts))

    def _read_part(self, part: npt.NDArray[np.generic]) -> float:
        self._together.wait()
        started = time.perf_counter()
        _sum(part)
        return time.perf_counter() - started


@numba.njit(fastmath=True, nogil=True)  # type: ignore[untyped-decorator]
def _sum(buffer: npt.NDArray[np.int64]) -> int:
    total = 0
    for value in buffer:
        total += value
    return total


def _print(report: Report) -> None:
    verdict = "meets" if report.single_per_floor <= FLOOR_BAR else "MISSES"
    print(f"{report.description}\n{report.machine.processor}, load {report.machine.load_average}")
    speed, size = report.read_gigabytes_per_second, report.weight_megabytes
    print(f"floor {report.floor_ms:.2f} ms: {size:.1f} MB at {speed:.1f} GB/s; context {report.context}")
    print(f"a step of 1 token takes {report.single_per_floor:.2f} floors ({verdict} {FLOOR_BAR})")
    for timing in report.timings:
        bar = BARS.get(int(timing.name[4:])) if timing.name.startswith("1 x") else None
        ratio = f"{timing.per_single:6.2f} x one token" if timing.per_single is not None else ""
        rate = f"{timing.tokens_per_second:8.0f} tokens/s" if timing.tokens_per_second is not None else ""
        note = "" if bar is None else f"  (bar {bar})"
        print(f"  {timing.name:20} {timing.ms:8.3f} ms {ratio}{rate}{note}")


if __name__ == "__main__":
    main()
