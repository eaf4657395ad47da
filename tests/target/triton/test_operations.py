"""The fused kernels, in Triton's interpreter, against plain torch."""

from __future__ import annotations

import pytest
import torch

from target import fp8
from target.attention import HeadLayout
from target.operations import Operations, TorchOperations
from target.rope import Rotation
from target.sampling import SamplingRow, choose
from target.sampling_params import SamplingParams
from target.triton.attention import TritonAttention
from target.triton.operations import TritonOperations, quantise_rows
from target.triton.sampling import PART, choose_unfiltered
from tests.target.triton.conftest import Case, Entry

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_norms_and_gates_agree_with_torch(dtype: torch.dtype) -> None:
    """RMSNorm, with and without a sum before it, and SwiGLU give what torch gives; the sum is kept in place."""

    def results(operations: Operations) -> list[torch.Tensor]:
        x, delta, weight = numbers(5, 96, dtype=dtype), numbers(5, 96, dtype=dtype, seed=1), numbers(96, dtype=dtype)
        plain = operations.normed(x, weight, 1e-5)
        return [
            plain,
            operations.add_normed(x, delta, weight, 1e-5),
            x,
            operations.gated(numbers(3, 2600, dtype=dtype)),
        ]

    for ours, theirs in zip(results(TritonOperations()), results(TorchOperations()), strict=True):
        assert ours.dtype == dtype
        assert torch.allclose(ours.float(), theirs.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_rows_of_operations_are_independent() -> None:
    """A row alone gives bit for bit what it gives among others."""
    x, weight = numbers(4, 200), numbers(200)
    operations = TritonOperations()
    assert torch.equal(operations.normed(x, weight, 1e-5)[2:3], operations.normed(x[2:3], weight, 1e-5))
    assert torch.equal(operations.gated(x)[2:3], operations.gated(x[2:3]))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rows_are_quantised_as_torch_does(dtype: torch.dtype) -> None:
    """Scales of rows of any size and of zeros, and numbers that need no rounding, are those of the specification.

    Rounding is the device's: the interpreter's own takes a number just below a power of two for half of it.
    """
    steps = numbers(5, 200).mul_(40).to(fp8.FP8).float()
    steps[:, 0] = fp8.LARGEST
    steps[3] = 0
    x = (steps * torch.tensor([0.5, 2.0**-7, 1.0, 1.0, 64.0])[:, None]).to(dtype)
    ours, theirs = quantise_rows(x), fp8.quantise_rows(x)
    assert torch.equal(ours[0].float(), theirs[0].float())
    assert torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("has_norms", [True, False])
def test_rotation_on_the_way_agrees_with_torch(has_norms: bool) -> None:
    """Heads that are normalised and rotated by the kernel that writes them give what torch's rotation gives."""
    heads = HeadLayout(4, 2, 32)
    case = Case((Entry(5, 3), Entry(20)), heads)
    angles = numbers(4, 16).repeat(1, 2)
    sign = torch.cat((-torch.ones(16), torch.ones(16)))
    norms = (numbers(32, seed=2), numbers(32, seed=3)) if has_norms else None
    rotation = Rotation(angles.cos(), angles.sin() * sign, norms, 1e-5)
    backend = TritonAttention(case.pool, heads, window=None)
    backend.begin(case.batch, 4)
    out = backend.attend(1, case.qkv.clone(), rotation)
    rotation.apply(case.qkv, 4, 2)
    assert torch.allclose(out, case.expected(), atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_those_of_the_specification(dtype: torch.dtype) -> None:
    """Greedy, sampled and min-p rows choose the very tokens that torch chooses, ties and several parts included."""
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=1),
        SamplingParams(seed=2**64 - 1, temperature=0.7),
        SamplingParams(seed=3, temperature=1.3, min_p=0.05),
    ] * 6
    logits = (numbers(len(params), 2 * PART + 77) * 4).round(decimals=1).to(dtype)
    rows = [SamplingRow(p, 40 + i) for i, p in enumerate(params)]
    chosen = choose_unfiltered(logits, params, [row.position for row in rows])
    assert chosen.tolist() == choose(logits, rows).tolist()
    assert len(set(chosen.tolist())) > 10
