"""One run that says how fast forerun is on a GPU, without a download: `python -m benchmarks.gpu --json OUT`.

Triton's kernels are checked against torch first. `--tiny --interpret` runs all of it on a CPU, to prove the script.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks.gpu_timing import Measurement, copy_bandwidth, timed
from benchmarks.machine import Machine, describe_machine

if TYPE_CHECKING:
    import torch

    from target.config import ModelConfig
    from target.layout import BatchEntry
    from target.triton.runner import TritonRunner

BLOCK_SIZE = 16


class GpuReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a run found."""

    machine: Machine
    torch: str
    triton: str
    runners: dict[str, str]
    bandwidth_gb_s: float
    checks: dict[str, bool]
    measurements: list[Measurement]
    left_out: list[str]
    """Parts, and why."""
    seconds: float


class Sizes(msgspec.Struct, frozen=True):
    """How much is measured."""

    context: int
    batches: tuple[int, ...]
    verified: tuple[int, ...]
    repeats: int
    prefill: int
    answer: int
    acceptances: tuple[float, ...]
    drafted: tuple[int, ...]


FULL = Sizes(512, (1, 8, 32, 64), (1, 2, 4, 8, 16), 20, 2048, 128, (0.6, 0.8, 0.95), (4, 8))
TINY_SIZES = Sizes(20, (1, 2), (1, 2), 1, 24, 6, (0.8,), (4,))


class Bench:
    """One model on one device."""

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        sizes: Sizes,
        quantization: str = "none",
    ) -> None:
        from benchmarks.gpu_model import random_weights
        from target.triton.runner import TritonRunner

        self.name, self.config, self.sizes, self.device = name, config, sizes, device
        self.layer_bytes = 1 if quantization == "fp8" else dtype.itemsize
        self.weights = random_weights(config, dtype, device)
        per_sequence = -(-(sizes.context + max(sizes.verified)) // BLOCK_SIZE)
        longest = -(-(sizes.context + sizes.prefill + sizes.answer) // BLOCK_SIZE)
        self.runner: TritonRunner = TritonRunner(
            config,
            self.weights,
            num_blocks=1 + max(max(sizes.batches) * per_sequence, 2 * longest),
            block_size=BLOCK_SIZE,
            max_model_len=config.max_model_len,
            device=device,
            quantization=quantization,
        )
        self.runner.kv_pool.entries.zero_()  # what was in memory before may be slow to compute with

    def entries(self, num_sequences: int, num_new: int) -> list[BatchEntry]:
        """Sequences with a context, each with one committed token and a draft."""
        from target.layout import BatchEntry

        count = -(-(self.sizes.context + num_new) // BLOCK_SIZE)
        return [
            BatchEntry(
                self.sizes.context,
                [1],
                range(1 + i * count, 1 + (i + 1) * count),
                [2] * (num_new - 1),
                range(-1, num_new - 2),
                logits_from=0,
            )
            for i in range(num_sequences)
        ]

    def step_ms(self, entries: list[BatchEntry]) -> float:
        """Milliseconds of a step, laying the batch out included, to the choice of its tokens on the host."""
        from target.layout import lay_out
        from target.sampling import SamplingRow, sample
        from target.sampling_params import SamplingParams

        greedy = SamplingParams(temperature=0.0)

        def step() -> None:
            logits = self.runner.forward(lay_out(entries, BLOCK_SIZE)).logits
            sample(logits, [SamplingRow(greedy, 0)] * len(logits))

        return 1e3 * timed(step, self.sizes.repeats, self.device)

    def measured(self, what: str, value: float, unit: str = "ms", floor: float | None = None) -> Measurement:
        return Measurement(model=self.name, what=what, value=round(value, 4), unit=unit, floor=floor)

    def decode_steps(self, bandwidth: float) -> Iterator[Measurement]:
        from benchmarks.gpu_model import step_bytes

        for batch in self.sizes.batches:
            num_bytes = step_bytes(
                self.config, batch * self.sizes.context, self.weights.embed.itemsize, self.layer_bytes
            )
            floor = round(1e3 * num_bytes / bandwidth, 4)
            yield self.measured(f"decode step, batch {batch}", self.step_ms(self.entries(batch, 1)), floor=floor)

    def verify_steps(self) -> Iterator[Measurement]:
        for count in self.sizes.verified:
            yield self.measured(f"verify step, {count} tokens", self.step_ms(self.entries(1, count)))

    def graphs_off(self) -> Iterator[Measurement]:
        enabled, self.runner.graphs.enabled = self.runner.graphs.enabled, False
        yield self.measured("decode step without graphs, batch 1", self.step_ms(self.entries(1, 1)))
        self.runner.graphs.enabled = enabled

    def prefill(self) -> Iterator[Measurement]:
        from target.layout import BatchEntry

        count = self.sizes.prefill
        entry = BatchEntry(0, [1] * count, range(1, 1 + -(-count // BLOCK_SIZE)), logits_from=count - 1)
        yield self.measured(f"prefill of {count} tokens", 1e3 * count / self.step_ms([entry]), "tokens/s")

    def decoding(self) -> Iterator[Measurement]:
        from benchmarks.gpu_decoding import Decoding

        decoding = Decoding(self.runner, list(range(self.sizes.context)), self.sizes.answer)
        decoding.plain()  # compiles and captures
        plain = decoding.plain()
        yield self.measured("decoding, plain", plain.tokens_per_second, "tokens/s")
        for acceptance in self.sizes.acceptances:
            for drafted in self.sizes.drafted:
                decoding.speculative(acceptance, drafted)
                found = decoding.speculative(acceptance, drafted)
                what = f"decoding, acceptance {acceptance}, k = {drafted}"
                yield self.measured(what, found.tokens_per_second, "tokens/s")
                same = float(found.token_ids == plain.token_ids)
                yield self.measured(f"{what}: same tokens as plain", same, "")

    def transformers(self) -> Iterator[Measurement]:
        import torch

        from benchmarks.gpu_model import transformers_model

        model = transformers_model(self.config, self.weights)
        prompt = torch.arange(self.sizes.context, device=self.device)[None] % self.config.vocab_size
        count = self.sizes.answer
        options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}
        for name, own in (("plain", {}), ("with prompt lookup of 8", {"prompt_lookup_num_tokens": 8})):

            def generate(length: int, own: dict[str, Any] = own) -> None:
                with torch.inference_mode():
                    model.generate(prompt, max_new_tokens=length, min_new_tokens=length, **options, **own)

            first, whole = (timed(partial(generate, length), 1, self.device) for length in (1, count))
            yield self.measured(f"transformers.generate, {name}", (count - 1) / max(whole - first, 1e-9), "tokens/s")


def benches(
    configs: dict[str, ModelConfig], dtype: torch.dtype, device: torch.device, sizes: Sizes, left_out: list[str]
) -> Iterator[tuple[Bench, bool]]:
    """One after another, so that each has the device to itself; whether everything is measured of it.

    The first is there a second time with 8-bit weights, where the device has them.
    """
    from target.fp8 import require_fp8

    for i, (name, config) in enumerate(configs.items()):
        yield Bench(name, config, dtype, device, sizes), True
        if i == 0:
            try:
                require_fp8(device, dtype)
            except ValueError as error:
                left_out.append(f"{name} fp8: {error}")
            else:
                yield Bench(f"{name} fp8", config, dtype, device, sizes, "fp8"), False


def measure(sizes: Sizes, configs: dict[str, ModelConfig], device: torch.device, budget: float) -> GpuReport:
    """Everything there is time for, in seconds."""
    import torch
    import triton

    from benchmarks.gpu_checks import all_checks
    from benchmarks.gpu_head import HeadBench

    started = time.monotonic()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    checks = all_checks(next(iter(configs.values())), dtype, device)
    bandwidth = copy_bandwidth(device)
    runners: dict[str, str] = {}
    found: list[Measurement] = []
    left_out: list[str] = []
    for bench, is_whole in benches(configs, dtype, device, sizes, left_out):
        runners[bench.name] = bench.runner.description
        parts: dict[str, Callable[[], Iterator[Measurement]]] = {
            "decode steps": partial(bench.decode_steps, bandwidth),
            "verify steps": bench.verify_steps,
            "graphs off": bench.graphs_off,
            "prefill": bench.prefill,
            "decoding": bench.decoding,
        }
        if is_whole:
            parts["a drafting head"] = HeadBench(bench.name, bench.config, dtype, device, sizes.repeats).steps
            parts["transformers"] = bench.transformers
        for part, measured in parts.items():
            if time.monotonic() - started > budget:
                left_out.append(f"{bench.name}: {part}, for which there was no time")
                continue
            for one in measured():
                found.append(one)
                print(line(one), flush=True)
        if device.type == "cuda":
            checks[f"{bench.name}: steps are captured"] = bench.runner.graphs.enabled
        del bench, parts, measured
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return GpuReport(
        machine=describe_machine(),
        torch=str(torch.__version__),
        triton=triton.__version__,
        runners=runners,
        bandwidth_gb_s=round(bandwidth / 1e9, 1),
        checks=checks,
        measurements=found,
        left_out=left_out,
        seconds=round(time.monotonic() - started, 1),
    )


def line(one: Measurement) -> str:
    """A measurement as people read it."""
    floor = "" if one.floor is None else f"   {one.value / one.floor:.2f} x the floor of {one.floor:.3f}"
    return f"{one.model:12} {one.what:45} {one.value:10.3f} {one.unit}{floor}"


def main(arguments: list[str]) -> int:
    """0 where all checks hold."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--json", type=Path, help="where the report goes")
    parser.add_argument("--tiny", action="store_true", help="a model of a few thousand weights")
    parser.add_argument("--interpret", action="store_true", help="on a CPU, in Triton's interpreter")
    parser.add_argument("--seconds", type=float, default=240.0, help="no part begins later than this")
    options = parser.parse_args(arguments)
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    import torch

    from benchmarks.gpu_model import LLAMA_8B, SMOLLM_135M, TINY

    if not options.interpret and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --tiny --interpret runs on a CPU")
    device = torch.device("cpu" if options.interpret else "cuda")
    configs = {"tiny": TINY} if options.tiny else {"llama-8b": LLAMA_8B, "smollm-135m": SMOLLM_135M}
    report = measure(TINY_SIZES if options.tiny else FULL, configs, device, options.seconds)
    print(f"copies within the device: {report.bandwidth_gb_s} GB/s")
    for name, holds in report.checks.items():
        print(f"{name}: {'yes' if holds else 'NO'}")
    for part in report.left_out:
        print(f"left out: {part}")
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    return 0 if all(report.checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
