"""File modes of written weights: readable as the user's umask says."""

from __future__ import annotations

from pathlib import Path


def apply_umask(path: Path) -> None:
    """Give `path` the mode of a new file. safetensors writes a temporary file of mode 0600 and renames it."""
    probe = path.with_name(f".{path.name}.mode")
    probe.touch()
    try:
        path.chmod(probe.stat().st_mode & 0o777)
    finally:
        probe.unlink()
