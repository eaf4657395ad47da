"""Small random models of every family, as folders and as transformers' own modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from target.embedded import embedded_model_dir
from tests.target.fp8_product import scaled_product

SHAPE: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "smollm": ("Llama", {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}),
    "llama3": ("Llama", {"tie_word_embeddings": False, "rope_parameters": LLAMA3_ROPE}),
    "mistral": ("Mistral", {"tie_word_embeddings": False, "sliding_window": 50, "num_key_value_heads": 6}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models gain nothing from a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def device_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """8-bit products as a device has them: torch's own run on some CPUs only, and take there what a device does not."""
    monkeypatch.setattr(torch, "_scaled_mm", scaled_product)


SaveModel = Callable[..., tuple[Path, Any]]


def make_model(family: str, **changes: Any) -> Any:
    """A random model of the family; norms and biases are random too, which transformers leaves at one and zero."""
    name, own = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**SHAPE | own | changes)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
        for key, parameter in model.named_parameters():
            if "norm" in key or key.endswith("bias"):
                parameter.data = torch.randn_like(parameter) * 0.3 + ("norm" in key)
            else:
                parameter.data.mul_(5.0)  # so that attention is not nearly uniform
    return model


@pytest.fixture
def save_model(tmp_path: Path) -> SaveModel:
    """Saves a random model of a family; gives its folder and the model."""

    def save(family: str, *, max_shard_size: str = "1GB", **changes: Any) -> tuple[Path, Any]:
        model = make_model(family, **changes)
        folder = tmp_path / f"{family}-{len(list(tmp_path.iterdir()))}"
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        return folder, model

    return save


@pytest.fixture(scope="session")
def embedded_folder() -> Path:
    """The embedded model, which `make test` fetches."""
    return embedded_model_dir()
