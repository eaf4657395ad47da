"""Medusa heads that nobody trained, as a folder: random ones for the tiny model, and such as repeat a token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from draft.head_checkpoint import TargetTables
from tests.tiny_model import TINY, tiny_weights


def tiny_tables(dtype: torch.dtype = torch.float64) -> TargetTables:
    weights = tiny_weights(dtype=dtype)
    return TargetTables(TINY, weights.embed, weights.lm_head, weights.norm)


def write_tiny_medusa(
    folder: Path, *, num_heads: int = 4, num_layers: int = 1, own_rows: bool = True, **fields: Any
) -> Path:
    generator = torch.Generator().manual_seed(8)
    size, vocab_size = TINY.hidden_size, TINY.vocab_size
    tensors = {}
    for i in range(num_heads):
        for j in range(num_layers):
            tensors[f"{i}.{j}.linear.weight"] = torch.randn(size, size, generator=generator) * 0.5
            tensors[f"{i}.{j}.linear.bias"] = torch.randn(size, generator=generator)
        if own_rows:
            tensors[f"{i}.{num_layers}.weight"] = torch.randn(vocab_size, size, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = {"medusa_num_heads": num_heads, "medusa_num_layers": num_layers} | fields
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_repeating_medusa(folder: Path, hidden_size: int, *, num_heads: int = 2) -> Path:
    """Heads for any model that all guess what the model itself says next: right wherever a token is repeated."""
    tensors = {f"{i}.0.linear.weight": torch.zeros(hidden_size, hidden_size) for i in range(num_heads)}
    tensors |= {f"{i}.0.linear.bias": torch.zeros(hidden_size) for i in range(num_heads)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": num_heads, "medusa_num_layers": 1}))
    return folder
