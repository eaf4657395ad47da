"""Tiny random models whose sizes the native step can compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from target.checkpoint import load_weights
from target.config import ModelConfig
from target.hf_config import read_config
from target.native.isa import native_supported
from target.native.load import load_native_runner
from target.native.packing import dequantise, quantise_q4, quantise_q8
from target.native.runner import NativeRunner
from target.torch_runner import TorchRunner
from target.weights import ModelWeights
from tests.target.conftest import make_model

SHAPE = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32}
NUM_BLOCKS = 160

Model = tuple[ModelConfig, ModelWeights]
ModelOf = Callable[[str], Model]
MakeRunner = Callable[..., NativeRunner]

if not native_supported()[0]:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> ModelOf:
    """The config and float32 weights of a random model of a family."""
    made: dict[str, Model] = {}

    def model(family: str) -> Model:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            make_model(family, **SHAPE).save_pretrained(folder)
            config = read_config(folder)
            made[family] = config, load_weights(folder, config, torch.float32)
        return made[family]

    return model


@pytest.fixture
def make_runner() -> Iterator[MakeRunner]:
    """Makes native runners and closes them at the end."""
    runners: list[NativeRunner] = []

    def make(model: Model, **changes: Any) -> NativeRunner:
        settings: dict[str, Any] = {"num_blocks": NUM_BLOCKS, "num_threads": 2} | changes
        runners.append(load_native_runner(*model, **settings))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


def torch_runner(model: Model) -> TorchRunner:
    """The specification: the torch path over the same weights."""
    config, weights = model
    length = config.max_model_len
    return TorchRunner(
        config, weights, num_blocks=NUM_BLOCKS, block_size=16, max_model_len=length, device=torch.device("cpu")
    )


def as_quantised(weights: ModelWeights, quantization: str) -> ModelWeights:
    """The float weights that the quantised ones stand for."""
    body = {"q4": quantise_q4, "int8": quantise_q8}[quantization]

    def through(tensor: torch.Tensor, quantise: Callable[..., Any]) -> torch.Tensor:
        return torch.from_numpy(dequantise(quantise(tensor.numpy())))

    embed = through(weights.embed, quantise_q8)
    tied = weights.lm_head is weights.embed
    layers = []
    for layer in weights.layers:
        fields = {name: getattr(layer, name) for name in type(layer).__slots__}
        matrices = {name: through(fields[name], body) for name in ("qkv", "output", "gate_up", "down")}
        layers.append(type(layer)(**(fields | matrices)))
    return ModelWeights(embed, layers, weights.norm, embed if tied else through(weights.lm_head, quantise_q8))
