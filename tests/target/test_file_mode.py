"""File modes of written weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from draft.training.head_export import write_medusa
from target.file_mode import apply_umask
from target.gguf_file import write_shards


@pytest.fixture(params=[0o022, 0o077, 0o027])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """A umask, and the former one again afterwards."""
    former = os.umask(request.param)
    yield request.param
    os.umask(former)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_written_weights_follow_the_umask(umask: int, tmp_path: Path) -> None:
    """A head's and a converted model's tensor files have the mode that any new file has, not 0600."""
    tensors = {"0.0.linear.weight": torch.zeros(2, 2)}
    write_medusa(tmp_path / "head", tensors, 1, target_name="t", storage="float32")
    write_shards(iter([("a", np.zeros(2, np.float32))]), tmp_path)
    assert mode(tmp_path / "head" / "model.safetensors") == 0o666 & ~umask
    assert mode(tmp_path / "model.safetensors") == 0o666 & ~umask


def test_nothing_but_the_mode_changes(tmp_path: Path) -> None:
    """The content stays, and the file that shows the mode of new files is removed."""
    path = tmp_path / "weights"
    path.write_bytes(b"w")
    apply_umask(path)
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"w", [path])
