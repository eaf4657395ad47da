"""What a model's files recommend for sampling reaches the front; what is wrong in them is named and left out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from gguf import GGUFWriter
from structlog.testing import capture_logs

from speculation.assembly import assemble
from speculation.messages import Ready
from speculation.settings import EngineSettings
from target import embedded
from target.digests import write_manifest
from target.embedded import FOLDER, cached_conversion, embedded_model_dir, keep_sampling_fields
from target.gguf_file import GGUFModel
from target.sampling_defaults import SOURCE_FIELD, SamplingDefaults, gguf_sampling_fields, read_sampling_defaults
from tests.tiny_folder import write_tiny_folder

GGUF_SOURCE = "general.sampling.* (GGUF)"


def defaults_in(folder: Path, content: str) -> tuple[SamplingDefaults, list[str]]:
    (folder / "generation_config.json").write_text(content)
    return read_sampling_defaults(folder)


def test_a_folder_s_recommendation_is_read(tmp_path: Path) -> None:
    """Every field that vLLM takes is taken, under the name a request has for it, with where it was read."""
    fields = {
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0,
        "repetition_penalty": 1.05,
        "max_new_tokens": 2048,
        "eos_token_id": [1, 2],
    }
    assert defaults_in(tmp_path, json.dumps(fields)) == (
        SamplingDefaults(
            temperature=0.6,
            top_p=0.95,
            top_k=20,
            min_p=0.0,
            repetition_penalty=1.05,
            max_tokens=2048,
            source="generation_config.json",
        ),
        [],
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"do_sample": False}, SamplingDefaults()),
        (
            {"do_sample": False, "temperature": 0.6},
            SamplingDefaults(temperature=0.6, source="generation_config.json"),
        ),
        ({"top_k": -1}, SamplingDefaults(top_k=0, source="generation_config.json")),
        ({"top_k": None, "temperature": None}, SamplingDefaults()),
        ({"eos_token_id": 2}, SamplingDefaults()),
    ],
)
def test_values_mean_what_they_mean_to_vllm(
    tmp_path: Path, fields: dict[str, object], expected: SamplingDefaults
) -> None:
    """`do_sample` is not looked at, a top_k of -1 keeps every token, and null recommends nothing."""
    assert defaults_in(tmp_path, json.dumps(fields)) == (expected, [])


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"temperature": "0.7"}', 'temperature is "0.7"; it must be a number from 0 to 2'),
        ('{"temperature": NaN}', "temperature is NaN; it must be a number from 0 to 2"),
        ('{"temperature": true}', "temperature is true; it must be a number from 0 to 2"),
        ('{"temperature": -1}', "temperature is -1; it must be a number from 0 to 2"),
        ('{"top_p": 0}', "top_p is 0; it must be a number above 0 and at most 1"),
        ('{"top_k": 40.5}', "top_k is 40.5; it must be a whole number from -1 to"),
        ('{"top_k": true}', "top_k is true; it must be a whole number from -1 to"),
        ('{"min_p": [0.1]}', "min_p is [0.1]; it must be a number from 0 to 1"),
        ('{"repetition_penalty": 0}', "repetition_penalty is 0; it must be a number from 0.001 to 10"),
        ('{"max_new_tokens": 0}', "max_new_tokens is 0; it must be a whole number from 1 to"),
        ("{", "generation_config.json is not readable JSON"),
        ("[1]", "generation_config.json holds a list; it must hold an object"),
        ("[" * 100_000, "generation_config.json is not readable JSON"),
    ],
)
def test_values_that_cannot_be_used_are_named_and_left_out(tmp_path: Path, content: str, problem: str) -> None:
    """A wrong type, a number out of range and a broken file recommend nothing and raise nothing."""
    defaults, problems = defaults_in(tmp_path, content)
    assert defaults == SamplingDefaults()
    assert [found[: len(problem)] for found in problems] == [problem]


def test_a_wrong_value_does_not_take_the_others_along(tmp_path: Path) -> None:
    """Where one value is wrong the others hold."""
    defaults, problems = defaults_in(tmp_path, '{"temperature": 0.5, "top_p": 7, "top_k": "many"}')
    assert defaults == SamplingDefaults(temperature=0.5, source="generation_config.json")
    assert [problem.split()[0] for problem in problems] == ["top_p", "top_k"]


def test_a_folder_without_a_generation_config_recommends_nothing(tmp_path: Path) -> None:
    """A missing file is no problem."""
    assert read_sampling_defaults(tmp_path) == (SamplingDefaults(), [])


def sampling_gguf(path: Path) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_sampling_temp(0.7)
    writer.add_sampling_top_p(0.8)
    writer.add_sampling_top_k(20)
    writer.add_sampling_min_p(0.05)
    writer.add_sampling_penalty_repeat(1.05)
    writer.add_sampling_mirostat(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


SAMPLING = SamplingDefaults(
    temperature=0.7, top_p=0.8, top_k=20, min_p=0.05, repetition_penalty=1.05, source=GGUF_SOURCE
)


def test_a_gguf_file_s_recommendation_is_read(tmp_path: Path) -> None:
    """llama.cpp's `general.sampling.*` keys become the fields of the converted folder, as the numbers they meant."""
    fields = GGUFModel(sampling_gguf(tmp_path / "model.gguf")).sampling_fields()
    assert defaults_in(tmp_path, json.dumps(fields)) == (SAMPLING, [])


def test_wrong_values_in_a_gguf_file_are_named(tmp_path: Path) -> None:
    """A value of another type or without a number is carried into the folder, whose reader names it."""
    fields = gguf_sampling_fields({"general.sampling.temp": float("nan"), "general.sampling.top_k": "many"})
    defaults, problems = defaults_in(tmp_path, json.dumps(fields))
    assert defaults == SamplingDefaults()
    assert len(problems) == 2


def test_an_earlier_conversion_of_a_gguf_file_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A converted folder without sampling values gets those of its file, once, and keeps its stop tokens."""
    monkeypatch.setattr(
        "target.gguf_file.convert_gguf",
        lambda _gguf, folder, _progress: (folder / "generation_config.json").write_text('{"eos_token_id": [2]}'),
    )
    path = sampling_gguf(tmp_path / "mine.gguf")
    folder = cached_conversion(path, print, tmp_path / "cache")
    assert read_sampling_defaults(folder) == (SAMPLING, [])
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2]
    (folder / "model.gguf").unlink()
    assert cached_conversion(path, print, tmp_path / "cache") == folder


def earlier_embedded(root: Path, content: str = '{"eos_token_id": [2]}') -> Path:
    folder = root / FOLDER
    folder.mkdir(parents=True)
    (folder / "generation_config.json").write_text(content)
    write_manifest(folder)
    return folder


def test_an_earlier_conversion_of_the_embedded_model_is_completed(tmp_path: Path) -> None:
    """Temperature 0.2 and top_p 0.9 are added to what is there, nothing else is left behind, and it happens once."""
    folder = earlier_embedded(tmp_path)
    assert embedded_model_dir(tmp_path) == folder
    expected = SamplingDefaults(temperature=0.2, top_p=0.9, source="generation_config.json")
    assert read_sampling_defaults(folder) == (expected, [])
    path = folder / "generation_config.json"
    assert json.loads(path.read_text())["eos_token_id"] == [2]
    assert {file.name for file in folder.iterdir()} == {"generation_config.json", "forerun-digests.json"}
    path.write_text(path.read_text().replace("0.2", "0.3"))
    embedded_model_dir(tmp_path)
    assert json.loads(path.read_text())["temperature"] == 0.3


def test_a_damaged_generation_config_is_left_as_it_is(tmp_path: Path) -> None:
    """What is no JSON object is not written over and ends no start here."""
    for content in ("{", "[]"):
        folder = earlier_embedded(tmp_path / str(len(content)), content)
        embedded_model_dir(folder.parent)
        assert (folder / "generation_config.json").read_text() == content


def test_a_failing_write_leaves_the_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the disk is full the file keeps its content, and no half-written one stays."""
    folder = earlier_embedded(tmp_path)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("target.atomic_file.os.fsync", full)
    keep_sampling_fields(folder, lambda: embedded.SAMPLING_FIELDS)
    assert (folder / "generation_config.json").read_text() == '{"eos_token_id": [2]}'
    assert len(list(folder.iterdir())) == 2


def test_the_embedded_model_recommends_its_card_s_values(embedded_folder: Path) -> None:
    """The folder that is served has temperature 0.2 and top_p 0.9."""
    defaults, problems = read_sampling_defaults(embedded_folder)
    assert (defaults.temperature, defaults.top_p, problems) == (0.2, 0.9, [])


def test_the_engine_tells_the_front_what_the_model_recommends(tmp_path: Path) -> None:
    """`Ready` has the folder's values over the wire, and values that were left out are one line of the log."""
    folder = write_tiny_folder(tmp_path)
    (folder / "generation_config.json").write_text('{"temperature": 0.4, "top_p": 7, "top_k": "x"}')
    settings = EngineSettings(
        model=str(folder), dtype="float32", backend="torch", device="cpu", num_blocks=40, max_model_len=128
    )
    with capture_logs() as logs:
        _, ready = assemble(settings)
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(ready), type=Ready)
    assert arrived.sampling_defaults == SamplingDefaults(temperature=0.4, source="generation_config.json")
    lines = [line for line in logs if line["event"] == "sampling defaults ignored"]
    assert [line["log_level"] for line in lines] == ["warning"]
    assert len(lines[0]["reasons"]) == 2


def test_an_engine_of_an_earlier_version_recommends_nothing() -> None:
    """A `Ready` without the field is understood."""
    old = {
        "type": "ready",
        "model_fingerprint": "m",
        "model_folder": "f",
        "max_model_len": 1,
        "vocab_size": 1,
        "num_blocks": 1,
        "block_size": 1,
        "methods": [],
        "max_waiting": 1,
        "description": "",
    }
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(old), type=Ready).sampling_defaults == SamplingDefaults()


def test_reading_defaults_loads_no_torch() -> None:
    """The module can be imported by the process that answers clients."""
    code = "import sys, target.sampling_defaults; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_source_is_part_of_the_file(tmp_path: Path) -> None:
    """A source that is no text falls back to the file's name."""
    defaults, _ = defaults_in(tmp_path, json.dumps({"temperature": 0.1, SOURCE_FIELD: 7}))
    assert defaults.source == "generation_config.json"
