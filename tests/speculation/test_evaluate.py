"""`forerun eval`: what it prints is what the engine counted, and bad input is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from speculation.evaluate import Tally, main, table
from tests.tiny_folder import write_tiny_folder
from tests.tiny_medusa import write_tiny_medusa


def test_a_tally_counts_by_position() -> None:
    """Position i counts drafts whose first i guesses were accepted; the length is one more than their sum."""
    tally = Tally()
    tally.add(num_tokens=20, num_steps=8, histogram=[4, 2])
    tally.add(num_tokens=10, num_steps=4, histogram=[1, 1, 2])
    assert tally.by_position == [5 / 10, 2 / 10]
    assert tally.mean_acceptance_length == pytest.approx(1.7)
    assert (tally.num_questions, tally.num_tokens, tally.num_steps) == (2, 30, 12)
    assert "2.500" in list(table({"all": tally}))[1]


def test_a_model_drafting_for_itself_is_always_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Evaluated as its own draft model, the target accepts every guess, in every category."""
    folder = write_tiny_folder(tmp_path / "target")
    questions = tmp_path / "questions"
    lines = [{"category": name, "turns": [f"w{i} w5"]} for i, name in enumerate(("a", "b", "a"))]
    questions.write_text("\n".join(map(json.dumps, lines)))
    options = {"target": folder, "draft": folder, "questions": questions, "max-tokens": 30, "json": tmp_path / "out"}
    options |= {"dtype": "float32", "backend": "torch", "num-speculative-tokens": 2}
    assert main([f"--{name}={value}" for name, value in options.items()]) == 0
    report = json.loads((tmp_path / "out").read_text())
    assert {name: tally["num_questions"] for name, tally in report.items()} == {"a": 2, "b": 1, "all": 3}
    assert report["all"]["by_position"][0] > 0.9  # a guess behind the last token can be right and not be needed
    assert "acceptance length" in capsys.readouterr().out


def test_bad_input_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A head without tensors for what it says, and questions that are none: exit status 2 and a sentence."""
    folder = write_tiny_folder(tmp_path / "target")
    questions = tmp_path / "questions"
    questions.write_text("")
    common = [f"--target={folder}", f"--questions={questions}", "--dtype=float32", "--backend=torch"]
    head = write_tiny_medusa(tmp_path / "head", medusa_num_heads=9)
    assert main([*common, f"--draft={head}"]) == 2
    assert "has no prompts" in capsys.readouterr().err
    questions.write_text("w1")
    assert main([*common, f"--draft={head}"]) == 2
    assert "4.0.linear.weight is missing" in capsys.readouterr().err
    assert main([*common, f"--draft={tmp_path / 'nowhere'}"]) == 2
    assert "does not exist" in capsys.readouterr().err
