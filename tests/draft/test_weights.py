"""The weights that come with forerun."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from draft.config import DraftModelConfig, Eagle3Config
from draft.weights import shipped_draft_model, shipped_eagle3
from speculation.assembly import assemble
from speculation.messages import SamplingParams, Submit
from speculation.settings import EngineSettings
from target.embedded import default_cache_dir, embedded_model_dir
from target.errors import CheckpointError
from tests.tiny_folder import write_tiny_folder


def folders() -> list[Path]:
    found = [shipped_eagle3("embedded"), shipped_draft_model("embedded")]
    assert None not in found
    return [folder for folder in found if folder is not None]


def test_the_record_is_of_these_weights() -> None:
    """Beside each stands how it was made, with its checksum and a curve that ends above its beginning."""
    for folder in folders():
        record = json.loads((folder / "training.json").read_text())
        assert record["model.safetensors"] == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        assert record["command"].startswith("forerun train")
        assert record["curve"][-1]["accuracies"][0] > record["curve"][0]["accuracies"][0]


def test_they_are_small() -> None:
    """Together at most 30 MB."""
    assert sum(file.stat().st_size for folder in folders() for file in folder.iterdir()) <= 30e6


def test_other_models_have_none(tmp_path: Path) -> None:
    """They belong to the embedded model alone; asking for the draft model with another one is an error that says so."""
    assert shipped_eagle3("/models/other") is shipped_draft_model("/models/other") is None
    model = write_tiny_folder(tmp_path / "tiny")
    with pytest.raises(ValueError, match=r'draft_model is "auto", but none comes with forerun for .*tiny'):
        assemble(EngineSettings(model=str(model), draft_model="auto", num_blocks=8))


@pytest.fixture(scope="module")
def fetched() -> None:
    try:
        embedded_model_dir()
    except CheckpointError:
        pytest.skip("the embedded model is not fetched; `forerun fetch` fetches it")


@pytest.mark.usefixtures("fetched")
def test_their_guesses_are_accepted() -> None:
    """Both load with the embedded model, and some of what they guess on an easy question is right."""
    settings = EngineSettings(draft_model="auto", cache_dir=str(default_cache_dir()), num_blocks=64)
    engine, ready = assemble(settings)
    tokenizer = Tokenizer.from_file(str(Path(embedded_model_dir()) / "tokenizer.json"))
    prompt = tokenizer.encode("<|im_start|>user\nCount from one to twenty.<|im_end|>\n<|im_start|>assistant\n").ids
    assert {"eagle3", "draft_model"} <= set(ready.methods)
    for config in (Eagle3Config(num_speculative_tokens=3), DraftModelConfig(num_speculative_tokens=3)):
        sampling = SamplingParams(temperature=0.0, max_tokens=40)
        request = Submit(request_id="0", prompt_token_ids=prompt, sampling=sampling, speculation=config)
        assert engine.submit(request) is None
        accepted = []
        while engine.has_work:
            accepted += [output.metrics.num_accepted_tokens for output in engine.step() if output.metrics is not None]
        assert accepted[0] > 0


@pytest.mark.usefixtures("fetched")
def test_the_head_can_be_left_out() -> None:
    """Told to be without a head, the embedded model is served without one."""
    _, ready = assemble(EngineSettings(eagle3=None, cache_dir=str(default_cache_dir()), num_blocks=64))
    assert "eagle3" not in ready.methods
