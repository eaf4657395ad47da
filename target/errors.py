"""What goes wrong with a model on disk."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

LFS_POINTER = b"version https://git-lfs"
"""Beginning of the text that a clone without Git LFS has in place of a large file."""


class CheckpointError(ValueError):
    """A checkpoint that is missing, truncated, or not what its config says; the message names file, field and cure."""


def unreadable(path: Path, wanted: str, error: Exception) -> str:
    """The message for a weight file that cannot be read as `wanted`, with what mends it."""
    with suppress(OSError), path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            return f"{path} is a Git LFS pointer, not {wanted}; run `git lfs pull` in its folder"
    return f"{path} is truncated or not {wanted} ({error}); fetch it again"
