"""Digests of a model folder's weight files, kept beside them: what was fetched or converted, and what is there now."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec

from target.atomic_file import write_atomically
from target.errors import CheckpointError

MANIFEST = "forerun-digests.json"
WEIGHT_SUFFIXES = (".gguf", ".safetensors")
BLOCK_BYTES = 1 << 20
DIGEST_BYTES = 16
MAX_SAMPLED_BLOCKS = 128
"""Blocks read at each start, in a thread beside the load: about 0.1 s of one core. A small file is read whole."""
MIN_SAMPLED_BLOCKS = 16
"""Blocks of each file, also where the others are large."""


class FileDigests(msgspec.Struct, frozen=True):
    """One file: its size in bytes, and the digests of its blocks of 1 MiB."""

    size: int
    blocks: str
    """SHA-256 of each block, cut to 16 bytes, as hex digits one behind the other."""

    def block(self, index: int) -> str:
        """The digest of one block."""
        return self.blocks[2 * DIGEST_BYTES * index : 2 * DIGEST_BYTES * (index + 1)]

    @property
    def num_blocks(self) -> int:
        return -(-self.size // BLOCK_BYTES)


class Manifest(msgspec.Struct, frozen=True):
    """The weight files of a folder by name."""

    files: dict[str, FileDigests]
    block_bytes: int = BLOCK_BYTES


def write_manifest(folder: Path) -> None:
    """Keep the digests of the folder's weight files as they are now. Raises OSError where it cannot be written."""
    files = {path.name: FileDigests(path.stat().st_size, "".join(_digests_of(path))) for path in weight_paths(folder)}
    write_atomically(folder / MANIFEST, msgspec.json.encode(Manifest(files)))


def weight_paths(folder: Path) -> list[Path]:
    """The weight files of a folder; GGUF first, which the native step reads."""
    return sorted(path for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES)


def read_manifest(folder: Path) -> Manifest | None:
    """The digests kept in a folder; None where there are none. Raises `CheckpointError` for a damaged file."""
    path = folder / MANIFEST
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); {remedy(folder)}") from error
    for name, kept in manifest.files.items():
        if manifest.block_bytes != BLOCK_BYTES or len(kept.blocks) != 2 * DIGEST_BYTES * kept.num_blocks:
            raise CheckpointError(f"{path} is damaged (digests of {name}); {remedy(folder)}")
    return manifest


def verify(folder: Path, *, whole: bool = False) -> None:
    """Compare weight files with the digests kept: their sizes, and blocks drawn at random, or `whole` every block.

    Raises `CheckpointError` naming the file and what to do. A folder without digests passes.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return
    left = MAX_SAMPLED_BLOCKS
    for name, kept in sorted(manifest.files.items()):
        path = folder / name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path} is missing ({error.strerror}); {remedy(folder)}") from error
        if size != kept.size:
            raise CheckpointError(f"{path} is damaged: it has {size} bytes and had {kept.size}; {remedy(folder)}")
        chosen = range(kept.num_blocks) if whole else _sample(kept.num_blocks, max(MIN_SAMPLED_BLOCKS, left))
        left -= len(chosen)
        _verify_blocks(path, kept, chosen)


@contextmanager
def verified(folder: Path) -> Iterator[None]:
    """`verify`, in a thread beside the block, which loads the folder; an error of damage goes before one of loading."""
    with ThreadPoolExecutor(1, thread_name_prefix="digests") as pool:
        check = pool.submit(verify, folder)
        try:
            yield
        finally:
            check.result()


def remedy(folder: Path) -> str:
    """What mends a damaged folder."""
    return (
        f"`forerun fetch --verify` fetches the embedded model again; any other is made again once {folder} is deleted"
    )


def _sample(num_blocks: int, count: int) -> list[int]:
    """Block numbers in order: the first, the last, and `count` less two others, drawn anew each time."""
    if num_blocks <= count:
        return list(range(num_blocks))
    return sorted({0, num_blocks - 1, *random.sample(range(1, num_blocks - 1), count - 2)})


def _verify_blocks(path: Path, kept: FileDigests, chosen: range | list[int]) -> None:
    with path.open("rb") as file:
        for index in chosen:
            file.seek(index * BLOCK_BYTES)
            if _digest(file.read(BLOCK_BYTES)) != kept.block(index):
                raise CheckpointError(
                    f"{path} is damaged: bytes {index * BLOCK_BYTES} and further on are not what was fetched or "
                    f"converted; {remedy(path.parent)}"
                )


def _digests_of(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield _digest(block)


def _digest(block: bytes) -> str:
    return hashlib.sha256(block).hexdigest()[: 2 * DIGEST_BYTES]
