"""A short name for exactly what computes: weights, precision, arithmetic, tokenizer."""

from __future__ import annotations

import hashlib
from pathlib import Path

from target.digests import MANIFEST

SAMPLE_BYTES = 4096
NUM_SAMPLES = 64
HEADER_BYTES = 1 << 20


def model_fingerprint(model_dir: Path, *, dtype: str, quantization: str = "none") -> str:
    """64 hex digits that differ where two models' keys and values would: the root of every prefix hash.

    Config and tokenizer files count whole. Of weight files, GGUF among them, count the size, the first megabyte (where
    safetensors lists tensors) and 64 pages of 4 KiB evenly spread: two trainings differ on every page, so this tells
    models apart in milliseconds, but it is no protection against somebody who edits a few weights on purpose. Damage
    that it does not see is found by `target.digests`.
    """
    digest = hashlib.sha256(f"forerun 1\0{dtype}\0{quantization}\0".encode())
    for path in sorted(model_dir.iterdir()):
        if path.name == MANIFEST:
            continue
        if path.suffix in {".json", ".jinja", ".model", ".txt"}:
            _add(digest, path.name, hashlib.sha256(path.read_bytes()).hexdigest())
        elif path.suffix in {".safetensors", ".gguf"}:
            _add(digest, path.name, sampled_digest(path))
    return digest.hexdigest()


def sampled_digest(path: Path) -> str:
    """64 hex digits of a large file: its size, its first megabyte, and pages spread evenly over the rest."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(HEADER_BYTES))
        for i in range(NUM_SAMPLES):
            file.seek(max(size - SAMPLE_BYTES, 0) * i // (NUM_SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _add(digest: hashlib._Hash, name: str, content: str) -> None:
    digest.update(f"{name}\0{content}\0".encode())
