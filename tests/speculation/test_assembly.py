"""From settings to an engine: a draft model that fits is served, and what does not fit is refused by name at start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from draft.config import DraftModelConfig, Eagle3Config
from speculation.assembly import assemble
from speculation.messages import SamplingParams, Submit
from speculation.settings import EngineSettings
from tests.tiny_folder import write_tiny_folder
from tests.tiny_model import TINY, tiny_weights


def settings_for(target: Path, **fields: Any) -> EngineSettings:
    return EngineSettings(
        model=str(target), dtype="float32", backend="torch", device="cpu", num_blocks=40, max_model_len=128, **fields
    )


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("target"))


def test_a_draft_model_that_fits_is_served(target: Path, tmp_path: Path) -> None:
    """Another size, a padded vocabulary and the same tokenizer: it drafts for the target, which is always right."""
    config = msgspec.structs.replace(TINY, num_layers=1, intermediate_size=40, vocab_size=64)
    draft = write_tiny_folder(tmp_path, config, tiny_weights(config, seed=2, dtype=torch.float32))
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    engine, ready = assemble(settings_for(target, draft_model=str(draft)))
    assert "draft_model" in ready.methods
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    answers: list[list[int]] = []
    for speculation in (None, DraftModelConfig(num_speculative_tokens=3, tree_size=9)):
        answers.append([])
        engine.submit(Submit(request_id="a", prompt_token_ids=[1, 2, 3], sampling=sampling, speculation=speculation))
        while engine.has_work:
            for output in engine.step():
                answers[-1] += output.token_ids
    assert answers[0] == answers[1]
    assert engine.stats().counters["drafts:draft_model"] > 0


def another_word(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"w7"', '"seven"'))


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def half_its_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def another_size(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "hidden_size": 32}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (another_word, r"draft_model .*another tokenizer .*token 7 is 'seven' there and 'w7' in the target"),
        (no_tokenizer, r"tokenizer.json is missing"),
        (half_its_weights, r"draft_model: .*model.safetensors"),
        (no_weights, r"draft_model: .*safetensors"),
        (another_size, r"draft_model: .*\[61, 16\].*\[61, 32\]"),
    ],
)
def test_a_draft_model_that_does_not_fit_is_refused(target: Path, tmp_path: Path, spoil: Any, message: str) -> None:
    """Another tokenizer, a missing or truncated file, tensors of another size: each is named, and the setting."""
    draft = write_tiny_folder(tmp_path / "draft")
    spoil(draft)
    with pytest.raises(ValueError, match=message):
        assemble(settings_for(target, draft_model=str(draft)))


def test_a_draft_model_that_is_not_there_is_refused(target: Path, tmp_path: Path) -> None:
    """The error names the setting, its value, and what would be right."""
    with pytest.raises(ValueError, match=r"draft_model is '.*nowhere'; it must be a Hugging Face folder"):
        assemble(settings_for(target, draft_model=str(tmp_path / "nowhere")))


def test_a_default_that_is_not_served_is_refused(target: Path) -> None:
    """A service cannot start with a method by default for which it has no weights."""
    with pytest.raises(ValueError, match="speculation: method 'eagle3' is not served here; one of ngram"):
        assemble(settings_for(target, speculation=Eagle3Config()))
