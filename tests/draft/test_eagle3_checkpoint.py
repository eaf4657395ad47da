"""EAGLE-3 checkpoints: the logits of the `speculators` package, both layouts, and errors that name what is wrong."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from draft.eagle3_checkpoint import load_eagle3, read_eagle3_config
from draft.eagle3_graphed import GraphedEagle3Head
from draft.eagle3_head import Eagle3Head, PairHead
from draft.head_checkpoint import TargetTables
from target.errors import CheckpointError
from target.layout import BatchEntry, lay_out
from tests.tiny_model import TINY

FIXTURES = Path(__file__).parent / "fixtures"
VARIANTS = sorted(path.name for path in FIXTURES.glob("eagle3_*"))
TARGET = msgspec.structs.replace(TINY, vocab_size=32, num_layers=4)


def tables() -> TargetTables:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(2, 32, 16, generator=generator)
    return TargetTables(TARGET, rows[0], rows[1], torch.ones(16))


def load(folder: Path, dtype: torch.dtype = torch.float64) -> Eagle3Head:
    head = load_eagle3(folder, tables(), num_blocks=16, block_size=4, dtype=dtype, device=torch.device("cpu"))
    assert isinstance(head, Eagle3Head)
    return head


def copied(folder: Path, variant: str = "eagle3_llama") -> Path:
    shutil.copytree(FIXTURES / variant, folder)
    (folder / "expected.safetensors").unlink()
    return folder


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_tensors(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in change(tensors).items()}, folder / "model.safetensors")


def logits_of(head: PairHead, states: torch.Tensor, token_ids: list[int], num_steps: int) -> list[torch.Tensor]:
    """[steps][n, C]: behind each pair, then behind `steps - 1` further tokens, each taken from `token_ids`."""
    hidden = head.fuse(states)
    blocks = range(1, 10)
    first, outputs = head.forward(lay_out([BatchEntry(0, token_ids, blocks, logits_from=0)], 4), hidden)
    found = [first, *(torch.zeros_like(first) for _ in range(num_steps - 1))]
    for i in range(len(token_ids)):
        output = outputs[i : i + 1]
        for step in range(1, min(num_steps, len(token_ids) - i)):
            entry = BatchEntry(i + step, [token_ids[i + step]], blocks, logits_from=0)
            logits, output = head.forward(lay_out([entry], 4), output)
            found[step][i] = logits[0]
        # The guesses overwrote pairs behind this one.
        head.forward(lay_out([BatchEntry(0, token_ids, blocks)], 4), hidden)
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_its_logits_are_those_of_the_speculators_package(variant: str, tmp_path: Path) -> None:
    """Same weights, same logits: behind features, and behind the head's own outputs."""
    expected = load_file(FIXTURES / variant / "expected.safetensors")
    head = load(copied(tmp_path / "head", variant))
    num_steps, length, _ = expected["logits"].shape
    found = logits_of(head, expected["states"], expected["token_ids"].tolist(), num_steps)
    for step in range(num_steps):
        torch.testing.assert_close(
            found[step][: length - step].float(), expected["logits"][step, : length - step], atol=2e-5, rtol=1e-4
        )


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_head_for_cuda_has_the_same_logits(variant: str, tmp_path: Path) -> None:
    """Triton's kernels, asked for, give what the plain head gives; a precision without kernels gets the plain one."""
    folder = copied(tmp_path / "head", variant)

    def loaded(dtype: torch.dtype) -> PairHead:
        device = torch.device("cpu")
        return load_eagle3(folder, tables(), num_blocks=16, block_size=4, dtype=dtype, device=device, uses_triton=True)

    head = loaded(torch.float32)
    assert isinstance(head, GraphedEagle3Head)
    assert isinstance(loaded(torch.float64), Eagle3Head)
    expected = load_file(FIXTURES / variant / "expected.safetensors")
    said = [
        logits_of(each, expected["states"], expected["token_ids"].tolist(), 2)
        for each in (head, load(folder, torch.float32))
    ]
    torch.testing.assert_close(said[0], said[1], atol=2e-5, rtol=1e-4)


def test_the_authors_layout_is_the_same_head(tmp_path: Path) -> None:
    """`midlayer.*` in a pytorch_model.bin, with a flat config, computes what the speculators folder does."""
    expected = load_file(FIXTURES / "eagle3_llama" / "expected.safetensors")
    folder = copied(tmp_path / "raw")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    renamed = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    torch.save(renamed, folder / "pytorch_model.bin")
    fields = json.loads((folder / "config.json").read_text())
    own = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 20}
    layers = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}}
    (folder / "config.json").write_text(json.dumps(fields["transformer_layer_config"] | own | layers))
    head = load(folder)
    assert head.config.feature_layers == (1, 2, 4)
    found = logits_of(head, expected["states"], expected["token_ids"].tolist(), 1)
    torch.testing.assert_close(found[0].float(), expected["logits"][0], atol=2e-5, rtol=1e-4)


def test_tables_left_out_are_the_target_s(tmp_path: Path) -> None:
    """Without embed_tokens and lm_head the head uses the target's embedding and output rows."""
    folder = copied(tmp_path / "head")
    change_tensors(folder, lambda t: {k: v for k, v in t.items() if not k.startswith(("embed_tokens", "lm_head"))})
    head = load(folder)
    assert head._layer._weights.embed is not None
    torch.testing.assert_close(head._layer._weights.embed, tables().embed)
    torch.testing.assert_close(head._layer._weights.lm_head.float(), tables().lm_head[head.target_ids])


def test_int8_rows_are_scaled(tmp_path: Path) -> None:
    """A matrix of int8 with a scale a row is the product of both."""
    folder = copied(tmp_path / "head")
    whole = load(folder)._layer._weights.fc

    def quantised(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        scale = tensors["fc.weight"].abs().amax(1) / 127
        return tensors | {
            "fc.weight": (tensors["fc.weight"] / scale[:, None]).round().to(torch.int8),
            "fc.weight_scale": scale,
        }

    change_tensors(folder, quantised)
    torch.testing.assert_close(load(folder)._layer._weights.fc, whole, atol=0.01, rtol=0)


def test_layers_default_to_the_paper_s_and_shift(tmp_path: Path) -> None:
    """Null means layers 2, N // 2 and N - 3, and a shift moves them all."""
    folder = copied(tmp_path / "head")
    change_config(folder, eagle_aux_hidden_state_layer_ids=None)
    target = msgspec.structs.replace(TARGET, num_layers=30)
    assert read_eagle3_config(folder, target).feature_layers == (2, 15, 27)
    assert read_eagle3_config(folder, target, shift_layers=1).feature_layers == (3, 16, 28)


def test_lossy_settings_are_ignored_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """verifier_accept_k above 1 would accept what the target did not say; it is named and has no effect."""
    folder = copied(tmp_path / "head")
    method = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 3}
    change_config(folder, speculators_config={"proposal_methods": [method]})
    with caplog.at_level(logging.WARNING):
        load(folder)
    assert "verifier_accept_k is 3" in caplog.text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"speculators_model_type": "dflash"}, "speculators_model_type is 'dflash'"),
        ({"target_hidden_size": 64}, "target_hidden_size is 64; the target's is 16"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "the target has layers 0 to 4"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 2, 3]}, "each may be named once"),
        ({"draft_vocab_size": 21}, "d2t has shape"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    """A field that does not fit this target or this loader is refused by its name and value."""
    folder = copied(tmp_path / "head")
    change_config(folder, **fields)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 32}, "hidden_size is 32, the target's is 16"),
        ({"vocab_size": 64}, "vocab_size is 64, the target's is 32"),
        ({"model_type": "gemma"}, "model_type is 'gemma'"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
        ({"intermediate_size": 40}, "gate_proj.weight has shape"),
    ],
)
def test_a_layer_of_another_model_is_named(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    """The decoder layer's own fields are checked against the target and the tensors."""
    folder = copied(tmp_path / "head")
    layer = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
    change_config(folder, transformer_layer_config=layer | fields)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    """A missing folder, missing weights, a truncated file, a missing tensor and a bad d2t each say what to do."""
    with pytest.raises(CheckpointError, match="does not exist"):
        load(tmp_path / "nowhere")
    folder = copied(tmp_path / "other")
    change_tensors(folder, lambda tensors: tensors | {"d2t": tensors["d2t"] + 30})
    with pytest.raises(CheckpointError, match="d2t does not map to 20 different ids below 32"):
        load(folder)
    folder = copied(tmp_path / "head")
    change_tensors(folder, lambda tensors: {k: v for k, v in tensors.items() if k != "fc.weight"})
    with pytest.raises(CheckpointError, match=r"the tensor fc.weight is missing"):
        load(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        load(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match="holds no"):
        load(folder)
