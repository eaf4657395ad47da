"""Whether the fast path says what the plain one says, and whether its rows are independent."""

from __future__ import annotations

import msgspec
import torch

from benchmarks.gpu_head import random_head
from benchmarks.gpu_model import random_weights
from draft.eagle3_graphed import GraphedEagle3Head
from draft.eagle3_head import Eagle3Architecture, Eagle3Head
from target import fp8
from target.config import ModelConfig
from target.layout import BatchEntry, lay_out
from target.torch_runner import TorchRunner
from target.triton.operations import quantise_rows
from target.triton.runner import TritonRunner

BLOCK_SIZE = 16
BUSHY = (-1, 0, 0, 1, -1, 4, 3, 2, 6)
MOST_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Rounding adds up to a third of it; what is laid out wrongly is off by more than 1."""


def all_checks(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> dict[str, bool]:
    """By what is claimed, on two layers of the model and a head for it; 8-bit weights where the device has them."""
    small = msgspec.structs.replace(config, num_layers=2, vocab_size=min(config.vocab_size, 4096))
    checks = decoder_checks(small, dtype, device, "none") | head_checks(small, dtype, device)
    try:
        fp8.require_fp8(device, dtype)
    except ValueError:
        return checks
    x = torch.randn(64, config.hidden_size, device=device).to(dtype)
    ours, theirs = quantise_rows(x), fp8.quantise_rows(x)
    checks["rows quantised as torch does, bitwise"] = torch.equal(
        ours[0].view(torch.uint8), theirs[0].view(torch.uint8)
    ) and torch.equal(ours[1], theirs[1])
    found = decoder_checks(small, dtype, device, "fp8")
    return checks | {f"fp8: {claim}": holds for claim, holds in found.items()}


def decoder_checks(config: ModelConfig, dtype: torch.dtype, device: torch.device, quantization: str) -> dict[str, bool]:
    """A prompt whole and in chunks, a bushy tree alone and among others, by Triton's path and by torch's."""
    weights = random_weights(config, dtype, device)
    length = 300 if device.type == "cuda" else 40
    ids = [(7 * i + 3) % config.vocab_size for i in range(length)]
    num = -(-(length + 16) // BLOCK_SIZE)
    tables = [range(1 + i * num, 1 + (i + 1) * num) for i in range(3)]
    tree = BatchEntry(length - 1, ids[-1:], tables[0], ids[:9], BUSHY, logits_from=0)
    logits: list[list[torch.Tensor]] = []
    for kind in (TorchRunner, TritonRunner):
        runner = kind(
            config,
            weights,
            num_blocks=1 + 3 * num,
            block_size=BLOCK_SIZE,
            max_model_len=config.max_model_len,
            device=device,
            quantization=quantization,
        )

        def run(*entries: BatchEntry, runner: TorchRunner | TritonRunner = runner) -> torch.Tensor:
            return runner.forward(lay_out(entries, BLOCK_SIZE)).logits

        whole = run(BatchEntry(0, ids, tables[0], logits_from=0))
        chunks = [run(BatchEntry(i, ids[i : i + 7], tables[1], logits_from=0)) for i in range(0, length, 7)]
        alone = [run(tree) for _ in range(3)][-1]  # by now replayed
        among = run(BatchEntry(0, ids[: length // 2], tables[2], logits_from=length // 2 - 1), tree)[1:]
        logits.append([whole, torch.cat(chunks), alone, among])
    theirs, ours = logits
    most = 0.2 if quantization == "fp8" else MOST_ERROR[dtype]
    return {
        "prompt as torch": error_of(ours[0], theirs[0]) < most,
        "tree as torch": error_of(ours[2], theirs[2]) < most,
        "chunks as whole, bitwise": torch.equal(ours[0], ours[1]),
        "tree among others as alone, bitwise": torch.equal(ours[2], ours[3]),
    }


def head_checks(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> dict[str, bool]:
    """An EAGLE-3 head's captured steps beside the plain head's."""
    layer = msgspec.structs.replace(config, num_layers=1)
    architecture = Eagle3Architecture(layer, (0, 1, 2), config.vocab_size)
    weights = random_head(architecture, dtype, device)
    hidden = torch.randn(20, config.hidden_size, device=device).to(dtype)
    prompt = lay_out([BatchEntry(0, list(range(20)), range(1, 4), logits_from=19)], BLOCK_SIZE)
    level = lay_out([BatchEntry(20, [1], range(1, 4), [2] * 9, BUSHY, logits_from=1)], BLOCK_SIZE)
    said = []
    for kind in (Eagle3Head, GraphedEagle3Head):
        head = kind(architecture, weights, num_blocks=5, block_size=BLOCK_SIZE)
        for _ in range(3):
            first, outputs = head.forward(prompt, hidden)
            second, _ = head.forward(level, torch.cat((outputs, hidden[:9])))
        said.append(torch.cat((first, second)).float())
    return {"EAGLE-3 head as plain": error_of(said[1], said[0]) < MOST_ERROR[dtype]}


def error_of(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """How far apart they are, as a share of how far apart unrelated ones would be."""
    return float((ours - theirs).std() / theirs.std())
