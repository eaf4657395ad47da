"""`forerun train`: from nothing but a target to a head that beats an untrained one, and on after a stop."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from speculation.evaluate import main as evaluate
from speculation.train import main
from tests.tiny_folder import write_tiny_folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("target") / "tiny")


def arguments(target: object, out: object, **changes: object) -> list[str]:
    options: dict[str, object] = {
        "target": target,
        "out": out,
        "num-prompts": 60,
        "max-answer-tokens": 60,
        "vocabulary": 61,
        "epochs": 12,
        "batch-pairs": 256,
        "learning-rate": 5e-3,
        "validate-every": 50,
        "dtype": "float32",
        "backend": "torch",
    }
    return [f"--{name}={value}" for name, value in (options | changes).items()]


def first_acceptance(target: Path, head: Path, scratch: Path) -> float:
    """How often the first guess is accepted, as `forerun eval` finds on prompts that were not trained on."""
    questions = scratch / "questions"
    questions.write_text("\n".join(f"w{i} w{(2 * i + 1) % 59} w3 w{i % 7}" for i in range(16)))
    report = scratch / "report.json"
    options = {"target": target, "draft": head, "questions": questions, "json": report, "dtype": "float32"}
    options |= {"backend": "torch", "max-tokens": 40, "temperature": 0.8, "num-speculative-tokens": 2}
    assert evaluate([f"--{name}={value}" for name, value in options.items()]) == 0
    return float(json.loads(report.read_text())["all"]["by_position"][0])


def untrained(trained: Path, folder: Path) -> Path:
    """The same head or model with random matrices."""
    shutil.copytree(trained, folder)
    torch.manual_seed(0)
    tensors = {
        name: torch.randn_like(tensor) * tensor.shape[1] ** -0.5
        if tensor.dim() == 2 and name != "lm_head.weight"
        else tensor
        for name, tensor in load_file(trained / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("method", ["eagle3", "medusa", "draft_model"])
def test_a_trained_head_beats_an_untrained_one(method: str, target: Path, tmp_path: Path) -> None:
    """Prompts, answers, training and checkpoint in one command; its guesses are accepted more than random ones."""
    out = tmp_path / "head"
    assert main(arguments(target, out, method=method)) == 0
    record = json.loads((out / "training.json").read_text())
    # Its first point is the closed-form start, which a hundred validated tokens cannot tell from a trained head.
    assert len(record["curve"]) > 1
    assert record["num_tokens"] > 1000
    random_acceptance = first_acceptance(target, untrained(out, tmp_path / "random"), tmp_path)
    assert first_acceptance(target, out, tmp_path) > 1.3 * random_acceptance


def test_a_stopped_training_goes_on_as_if_it_had_not(target: Path, tmp_path: Path) -> None:
    """Stopped after every few updates and started again, it ends with the same weights."""
    prompts = tmp_path / "prompts"
    prompts.write_text("\n".join(f"w{i} w{2 * i % 59} w{3 * i % 59}" for i in range(40)))
    options = {"prompts": prompts, "epochs": 2}
    assert main(arguments(target, tmp_path / "whole", **options)) == 0
    pieces = tmp_path / "pieces"
    for _ in range(100):
        assert main(arguments(target, pieces, **options, **{"max-seconds": 0})) == 0
        if pieces.exists():
            break
    whole, found = (load_file(folder / "model.safetensors") for folder in (tmp_path / "whole", pieces))
    assert whole.keys() == found.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, found[name]), name
    curve = (Path(f"{pieces}.work") / "curve.jsonl").read_text().splitlines()
    assert len(curve) == len({json.loads(line)["update"] for line in curve})


def test_tasks_over_texts_are_recorded_as_well(target: Path, tmp_path: Path) -> None:
    """Prompts made of the passages of a text come on top of the others, and the record names the text."""
    text = tmp_path / "words.txt"
    text.write_text("\n\n".join(" ".join(f"w{(i * j) % 59}" for j in range(30)) for i in range(1, 30)))
    options = {"texts": text, "num-text-prompts": 90, "num-prompts": 15, "epochs": 1, "max-answer-tokens": 8}
    assert main(arguments(target, tmp_path / "head", **options)) == 0
    record = json.loads((tmp_path / "head" / "training.json").read_text())
    assert (record["num_text_prompts"], record["texts"]) == (90, ["words.txt"])
    assert record["num_sequences"] > 60


def test_bfloat16_products_teach_as_well(target: Path, tmp_path: Path) -> None:
    """With `--bfloat16` the validated guesses get better, and the written weights are finite."""
    assert main([*arguments(target, tmp_path / "head"), "--bfloat16"]) == 0
    record = json.loads((tmp_path / "head" / "training.json").read_text())
    assert record["settings"]["is_bfloat16"]
    assert record["curve"][-1]["accuracies"][0] > record["curve"][0]["accuracies"][0] - 0.05
    assert all(tensor.isfinite().all() for tensor in load_file(tmp_path / "head" / "model.safetensors").values())


def test_bad_input_is_named(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing target, a layer the target does not have, an empty prompt file: exit status 2 and a sentence."""
    empty = tmp_path / "empty"
    empty.write_text("")
    cases: list[tuple[dict[str, object], str]] = [
        ({"target": tmp_path / "nowhere"}, "does not exist"),
        ({"feature-layers": "1,9"}, "--feature-layers is 1,9; the target has layers 0 to 2"),
        ({"prompts": empty}, "has no prompts"),
        ({"texts": empty}, "no text there"),
        ({"method": "draft_model", "hidden-size": 50}, "--hidden-size is 50; it must be a multiple of 32"),
        ({"method": "draft_model", "layers": 0}, "--layers is 0"),
    ]
    for changes, message in cases:
        assert main(arguments(**{"target": target, "out": tmp_path / "out"} | changes)) == 2
        assert message in capsys.readouterr().err
