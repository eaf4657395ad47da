"""Weights as 8-bit floats: how near they are, that rows stay apart, and where they are refused."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from speculation.assembly import assemble
from speculation.settings import EngineSettings
from target import load
from target.fp8 import FP8, LARGEST, fp8_library, fp8_linear, quantise_rows, require_fp8
from target.layout import BatchEntry
from target.linear import choose_products
from target.load import load_runner
from target.torch_runner import TorchRunner
from target.weights import LayerWeights, ModelWeights
from tests.target.conftest import SaveModel
from tests.target.forwards import in_chunks, run, tokens
from tests.tiny_model import TINY, tiny_weights

pytestmark = pytest.mark.usefixtures("device_product")

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
EVEN = msgspec.structs.replace(TINY, hidden_size=32, intermediate_size=48, num_layers=4)
"""The tiny model with sizes that 8-bit products have."""


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def allowed_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading takes this CPU for a device that has 8-bit products."""
    monkeypatch.setattr(load, "require_fp8", lambda device, dtype: None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_number_is_near_its_quantised_one(dtype: torch.dtype) -> None:
    """Within a sixteenth of itself, or half the smallest step of its row's scale; rows of any size, and zeros."""
    x = (numbers(6, 400) * torch.tensor([1e-6, 1.0, 1e4, 0.0, 3.0, 1e-20])[:, None]).to(dtype)
    quantised, scales = quantise_rows(x)
    assert (quantised.dtype, scales.shape) == (FP8, (6, 1))
    error = (quantised.float() * scales - x.float()).abs()
    assert (error <= torch.maximum(x.float().abs() / 16, scales * 2**-10) * 1.0001).all()
    assert quantised.float().abs().amax(1)[[0, 1, 2, 4]].tolist() == [LARGEST] * 4


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_linear_is_near_the_float_one(has_bias: bool) -> None:
    """The product differs from that in float32 as rounding of both factors to three bits does, in bfloat16."""
    weight, x = numbers(96, 256).bfloat16(), numbers(32, 256, seed=1).bfloat16()
    bias = numbers(96, seed=2).bfloat16() if has_bias else None
    out = fp8_linear(weight, bias, quantise=quantise_rows)(x)
    expected = x.float() @ weight.float().T + (0.0 if bias is None else bias.float())
    assert out.dtype == torch.bfloat16
    assert 0.01 < (out.float() - expected).std() / expected.std() < 0.06


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """A row beside a thousand times larger ones is bit for bit what it is beside zeros, at every number of rows."""
    weight = numbers(64, 128).bfloat16()
    products = choose_products([(weight, None)], CPU, 64, (16, 32, 64), [fp8_library()])
    assert (products.library, products.row_counts.counts, products.stable) == ("fp8", (16, 32, 64), True)
    linear = products.make(weight, None)
    row = numbers(1, 128, seed=1).bfloat16()
    alone = linear(torch.cat((row, torch.zeros(15, 128).bfloat16())))[0]
    for num_rows in (16, 32, 64, 128):
        among = (numbers(num_rows, 128, seed=2) * 1000).bfloat16()
        among[7] = row
        assert torch.equal(linear(among)[7], alone)


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "wanted"),
    [
        (CPU, (0, 0), torch.bfloat16, r"'fp8'.*8\.9 or later.*'cpu'; 'auto' fits every device, and on a CPU 'none'"),
        (CUDA, (8, 6), torch.bfloat16, r"'fp8'.*needs compute capability 8\.9.*'cuda' has 8\.6, where 'auto' and"),
        (CUDA, (9, 0), torch.float16, r"'fp8'.*dtype is 'float16'; 'auto' and 'bfloat16' fit"),
    ],
)
def test_where_there_are_no_such_products_it_says_so(
    device: torch.device,
    capability: tuple[int, int],
    dtype: torch.dtype,
    wanted: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other devices, older ones and other precisions are refused with setting, value and what fits."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(ValueError, match=wanted):
        require_fp8(device, dtype)


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 0)])
def test_newer_devices_are_taken(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ada, Hopper, Blackwell."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    require_fp8(CUDA, torch.bfloat16)


@pytest.mark.parametrize("backend", ["auto", "torch", "native"])
def test_a_cpu_is_refused_when_loading(backend: str, save_model: SaveModel) -> None:
    """Whatever the backend."""
    folder, _ = save_model("llama")
    with pytest.raises(ValueError, match="quantization is 'fp8'"):
        load_runner(folder, num_blocks=2, backend=backend, device="cpu", quantization="fp8")


def test_odd_sizes_are_refused(allowed_anywhere: None, save_model: SaveModel) -> None:
    """A model whose matrices do not come in sixteens is refused with the matrix."""
    folder, _ = save_model("llama", intermediate_size=88)
    with pytest.raises(ValueError, match=r"'fp8', which needs matrices .* multiples of 16; .* 48 x 88, .*'none' fits"):
        load_runner(folder, num_blocks=2, device="cpu", quantization="fp8", backend="torch")


@pytest.mark.parametrize("family", ["smollm", "qwen2"])
def test_a_folder_loads_quantised(family: str, allowed_anywhere: None, save_model: SaveModel) -> None:
    """Its logits are near the float ones and not the same, bitwise alike in chunks; the description says fp8."""
    folder, _ = save_model(family)
    whole, fp8 = (
        load_runner(folder, num_blocks=20, device="cpu", dtype="float32", backend="torch", quantization=quantization)
        for quantization in ("none", "fp8")
    )
    assert "fp8" in fp8.description
    ids = tokens(40, seed=1)
    theirs, ours = (in_chunks(runner, ids, 40, [1, 2, 3]) for runner in (whole, fp8))
    assert 0.001 < (ours - theirs).std() / theirs.std() < 0.3
    assert torch.equal(in_chunks(fp8, ids, 7, [4, 5, 6]), ours)


def test_a_quantised_model_has_a_fingerprint_of_its_own(
    allowed_anywhere: None, save_model: SaveModel, tmp_path: Path
) -> None:
    """Its prefixes are never taken for those of the unquantised model."""
    folder, _ = save_model("llama")
    settings = EngineSettings(
        model=str(folder), device="cpu", backend="torch", num_blocks=20, eagle3=None, cache_dir=str(tmp_path)
    )
    fingerprints = {
        assemble(msgspec.structs.replace(settings, quantization=quantization))[1].model_fingerprint
        for quantization in ("none", "fp8")
    }
    assert len(fingerprints) == 2


class Counted:
    """Layers made one by one, and how many of their matrices are alive at most."""

    def __init__(self, weights: ModelWeights) -> None:
        self._layers = list(weights.layers)
        self._made: list[weakref.ref[torch.Tensor]] = []
        self.most = 0

    def __iter__(self) -> Iterator[LayerWeights]:
        for layer in self._layers:
            fields = {name: getattr(layer, name) for name in LayerWeights.__slots__}
            matrices = {name: fields[name].clone() for name in ("qkv", "output", "gate_up", "down")}
            self._made += map(weakref.ref, matrices.values())
            made = LayerWeights(**(fields | matrices))
            del matrices, fields
            self.most = max(self.most, sum(ref() is not None for ref in self._made))
            yield made
            del made


def test_few_layers_are_there_beside_the_quantised_ones() -> None:
    """While a model is quantised, no more than two layers' matrices exist as they were."""
    weights = tiny_weights(EVEN, dtype=torch.float32)
    weights.layers = counted = Counted(weights)
    runner = TorchRunner(EVEN, weights, num_blocks=4, block_size=16, max_model_len=64, device=CPU, quantization="fp8")
    assert counted.most <= 2 * 4
    assert run(runner, BatchEntry(0, [1, 2, 3], [1], logits_from=0)).shape == (3, 61)
