"""Folders that hold a head: tensors by name from safetensors or torch files, and what a head borrows of its target."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open

from target.checkpoint import FLOATS, Checkpoint, require_none_left, require_numbers
from target.config import ModelConfig
from target.errors import CheckpointError
from target.hf_config import read_config

SCALE = "_scale"
"""A matrix stored as int8 has beside it, under its name and this, one scale a row."""


INTEGERS = frozenset({torch.int64, torch.int32})
INTEGER_NAMES = frozenset({"d2t"})


@dataclass(frozen=True, slots=True)
class TargetTables:
    """The target's embedding and output rows, which heads share with it, and its shape."""

    config: ModelConfig
    embed: torch.Tensor
    """[vocabulary, E], where it lies, in any float dtype"""
    lm_head: torch.Tensor
    """[vocabulary, E], the same"""
    norm: torch.Tensor
    """[E] of the final norm"""

    @classmethod
    def of(cls, model_dir: Path) -> Self:
        """Those of a model folder, mapped from its files. Raises `CheckpointError`."""
        config = read_config(model_dir)
        shape = (config.vocab_size, config.hidden_size)
        with Checkpoint(model_dir) as checkpoint:
            embed = checkpoint.read("model.embed_tokens.weight", shape)
            head = embed if config.tie_word_embeddings else checkpoint.read("lm_head.weight", shape)
            return cls(config, embed, head, checkpoint.read("model.norm.weight", (config.hidden_size,)))


class HeadTensors:
    """Every tensor of a head's folder, taken by name and shape."""

    def __init__(self, folder: Path, prefixes: tuple[str, ...] = ("model.",)) -> None:
        """Names may begin with one of `prefixes`. Raises `CheckpointError` for a folder without whole weight files."""
        self.folder = folder
        self._tensors: dict[str, torch.Tensor] = {}
        for name, tensor in _read_all(folder).items():
            prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
            self._tensors[name.removeprefix(prefix)] = tensor
        self._left = set(self._tensors)
        """Tensors that nobody took yet."""

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """The tensor `name`, of this shape, its int8 rows scaled. Raises `CheckpointError` where it is not there."""
        tensor = self._tensors.get(name)
        if tensor is None:
            some = ", ".join(sorted(self._tensors)[:6])
            raise CheckpointError(f"{self.folder}: the tensor {name} is missing; there are {some}, …")
        self._left.discard(name)
        if shape is not None and tuple(tensor.shape) != shape:
            found, wanted = list(tensor.shape), list(shape)
            raise CheckpointError(f"{self.folder}: {name} has shape {found}; config.json asks for {wanted}")
        if tensor.dtype == torch.int8:
            scale = self.take(name + SCALE).float().reshape(-1, *(1,) * (tensor.dim() - 1))
            if len(scale) != len(tensor):
                raise CheckpointError(f"{self.folder}: {name}{SCALE} has {len(scale)} rows; {name} has {len(tensor)}")
            return tensor.float() * scale
        require_numbers(self.folder, name, tensor, INTEGERS if name in INTEGER_NAMES else FLOATS)
        return tensor

    def ignore(self, patterns: Iterable[str]) -> int:
        """Let tensors whose names match one of the shell patterns go unused; returns how many there are."""
        unused = {name for name in self._left if any(fnmatchcase(name, pattern) for pattern in patterns)}
        self._left -= unused
        return len(unused)

    def require_all_taken(self) -> None:
        """Raises `CheckpointError` naming tensors that were neither taken nor ignored."""
        require_none_left(self.folder, self._left)


def _read_all(folder: Path) -> dict[str, torch.Tensor]:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; a head is a folder with config.json and its weights")
    safe = sorted(path for path in folder.glob("*.safetensors"))
    pickled = [*sorted(folder.glob("pytorch_model*.bin")), *sorted(folder.glob("medusa_lm_head.pt"))]
    if not safe and not pickled:
        raise CheckpointError(f"{folder} holds no *.safetensors and no pytorch_model.bin; a head needs its weights")
    tensors: dict[str, torch.Tensor] = {}
    try:
        for path in safe:
            with safe_open(path, framework="pt") as file:
                tensors.update((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118  not a mapping
        for path in [] if safe else pickled:
            tensors.update(torch.load(path, map_location="cpu", weights_only=True))
    except (SafetensorError, OSError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{path} is truncated or not a weight file ({error}); fetch it again") from error
    return tensors
