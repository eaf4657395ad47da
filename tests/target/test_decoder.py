"""The decoder computes what transformers computes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from target.errors import CheckpointError
from target.hf_config import read_config
from target.layout import BatchEntry, lay_out
from target.load import load_runner
from tests.target.conftest import FAMILIES, LLAMA3_ROPE, SaveModel
from tests.target.forwards import in_chunks, tokens


def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, save_model: SaveModel) -> None:
    """For every family the logits of 300 tokens, in chunks of 64, differ from transformers' by less than 1e-3."""
    folder, model = save_model(family)
    runner = load_runner(folder, num_blocks=32, backend="torch")
    ids = tokens(300, seed=1)
    ours = in_chunks(runner, ids, 64, range(1, 20))
    reference = logits_of(model, ids)
    assert reference.std() > 0.1
    assert (ours - reference).abs().max() < 1e-3


@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(4, 4, 12), (7, 1, 8), (8, 2, 32)])
def test_any_grouping_of_heads(heads: int, kv_heads: int, head_size: int, save_model: SaveModel) -> None:
    """Every ratio of query to key-value heads, and a head size that is not hidden size / heads, computes alike."""
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_size, "hidden_size": 56}
    folder, model = save_model("llama", **shape)
    runner = load_runner(folder, num_blocks=16, backend="torch")
    ids = tokens(150, seed=2)
    assert (in_chunks(runner, ids, 150, range(1, 11)) - logits_of(model, ids)).abs().max() < 1e-3


def test_sharded_checkpoints_load_like_whole_ones(save_model: SaveModel) -> None:
    """The same model in several files with an index gives the same logits, bit for bit."""
    whole, _ = save_model("llama")
    sharded, _ = save_model("llama", max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    ids = tokens(20, seed=3)
    results = [in_chunks(load_runner(f, num_blocks=4, backend="torch"), ids, 20, [1, 2]) for f in (whole, sharded)]
    assert torch.equal(results[0], results[1])


def test_configs_of_transformers_4_and_5_read_alike(save_model: SaveModel) -> None:
    """`rope_theta` beside `rope_scaling` means what `rope_parameters` means."""
    folder, _ = save_model("llama3")
    new = read_config(folder)
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    del fields["rope_parameters"]
    fields["rope_theta"] = LLAMA3_ROPE["rope_theta"]
    fields["rope_scaling"] = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    path.write_text(json.dumps(fields))
    assert new.rope_scaling is not None
    assert read_config(folder) == new


def test_stop_tokens_come_from_both_configs(save_model: SaveModel) -> None:
    """The ids of generation_config.json come before those of config.json, each once."""
    folder, _ = save_model("llama", eos_token_id=5)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 5]}))
    assert read_config(folder).eos_token_ids == (9, 5)


@pytest.mark.parametrize("place", ["tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize("eos", ["<|im_end|>", {"__type": "AddedToken", "content": "<|im_end|>"}])
def test_the_tokenizer_s_eos_ends_a_sequence(save_model: SaveModel, place: str, eos: object) -> None:
    """A fine-tune that names its end of turn only as the tokenizer's `eos_token` stops there, too."""
    folder, _ = save_model("llama", eos_token_id=2)
    config: dict[str, object] = {"eos_token": eos}
    if place == "tokenizer.json":
        tokens = [{"id": 5, "content": "<|im_start|>"}, {"id": 7, "content": "<|im_end|>"}]
        (folder / place).write_text(json.dumps({"added_tokens": tokens}))
    else:
        config["added_tokens_decoder"] = {"5": {"content": "<|im_start|>"}, "7": {"content": "<|im_end|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert read_config(folder).eos_token_ids == (2, 7)


def test_the_eos_of_an_older_tokenizer_ends_a_sequence(save_model: SaveModel) -> None:
    """`special_tokens_map.json` counts where `tokenizer_config.json` names no `eos_token`."""
    folder, _ = save_model("llama", eos_token_id=2)
    tokens = [{"id": 5, "content": "<|im_start|>"}, {"id": 7, "content": "<|im_end|>"}]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    assert read_config(folder).eos_token_ids == (2, 7)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_start|>"}))
    assert read_config(folder).eos_token_ids == (2, 5)


@pytest.mark.parametrize("content", ["[]", "{", '"x"', '{"eos_token": 3}', '{"eos_token": {"content": null}}'])
def test_an_unknown_shape_of_the_tokenizer_s_files_names_no_stop_token(save_model: SaveModel, content: str) -> None:
    """Whatever `tokenizer_config.json` holds, the stop tokens of the configs are read."""
    folder, _ = save_model("llama", eos_token_id=2)
    (folder / "tokenizer_config.json").write_text(content)
    assert read_config(folder).eos_token_ids == (2,)


@pytest.mark.parametrize(
    "listed", [3, [3, {"content": "<eot>"}, {"id": "7", "content": "<eot>"}], {"x": {"content": "<eot>"}, "7": "<eot>"}]
)
@pytest.mark.parametrize("place", ["tokenizer_config.json", "tokenizer.json"])
def test_an_unknown_shape_of_the_added_tokens_names_no_stop_token(
    save_model: SaveModel, listed: object, place: str
) -> None:
    """Added tokens without an id, or in no list, are passed over."""
    folder, _ = save_model("llama", eos_token_id=2)
    config: dict[str, object] = {"eos_token": "<eot>"}
    if place == "tokenizer.json":
        (folder / place).write_text(json.dumps({"added_tokens": listed}))
    else:
        config["added_tokens_decoder"] = listed
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert read_config(folder).eos_token_ids == (2,)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", ["2", True, 2.5, [2, None], {"id": 2}])
def test_a_stop_token_of_a_wrong_type_is_refused(save_model: SaveModel, name: str, value: object) -> None:
    """A stop token that cannot be understood is named; ignoring it would make answers that never end."""
    folder, _ = save_model("llama", eos_token_id=2)
    path = folder / name
    fields = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**fields, "eos_token_id": value}))
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)}: eos_token_id is .*a token id, a list of them"):
        read_config(folder)


WRONG = ["x", -1, 1.5, True, ["x"], [None], {"a": 1}, float("nan"), float("inf")]


@pytest.mark.parametrize("family", ["llama", "llama3", "qwen2", "mistral"])
def test_a_field_of_a_wrong_type_is_named(save_model: SaveModel, family: str) -> None:
    """Whatever a field of config.json holds, it is read, or refused with the file and the field."""
    folder, _ = save_model(family)
    path = folder / "config.json"
    fields = json.loads(path.read_text()) | {"bos_token_id": 1, "head_dim": 16}
    rope = fields.pop("rope_parameters")
    fields |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    if family != "llama":
        fields |= {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0, "layer_types": None}
    refused: dict[str, str] = {}
    for name in (*fields, "rope_parameters", *rope):
        for value in WRONG:
            wrong = {**fields, "rope_scaling": {**rope, name: value}} if name in rope else {**fields, name: value}
            path.write_text(json.dumps(wrong))
            try:
                read_config(folder)
            except CheckpointError as error:
                refused[name] = str(error)
    assert all(message.startswith(str(path)) for message in refused.values())
    assert refused.keys() >= {
        "architectures",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
    }
    assert refused.keys() >= {"hidden_size", "vocab_size", "bos_token_id", "eos_token_id", "rope_parameters"}


def test_a_negative_stop_token_is_none(save_model: SaveModel) -> None:
    """Files that write -1 for "no token" are read."""
    folder, _ = save_model("llama", eos_token_id=-1)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [-1, 5]}))
    assert read_config(folder).eos_token_ids == (5,)


def test_the_embedded_model_agrees_with_transformers(embedded_folder: Path) -> None:
    """On a real chat prompt the embedded model's logits are those of transformers, up to 1e-3."""
    tokenizer = AutoTokenizer.from_pretrained(embedded_folder)
    question = [{"role": "user", "content": "What is a KV cache? Name 3 uses of it, and write 1 + 22 = 23."}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    model = AutoModelForCausalLM.from_pretrained(embedded_folder, dtype=torch.float32).eval()
    runner = load_runner(embedded_folder, num_blocks=16, backend="torch")
    ours, reference = in_chunks(runner, ids, 40, range(1, 16)), logits_of(model, ids)
    assert (ours - reference).abs().max() < 1e-3
    assert torch.equal(ours.argmax(-1), reference.argmax(-1))


def test_features_are_the_hidden_states(save_model: SaveModel) -> None:
    """Asked layers' hidden states come back for every row: 0 the embedding, -1 the normed last state."""
    folder, model = save_model("llama")
    runner = load_runner(folder, num_blocks=8, backend="torch")
    ids = tokens(10, seed=4)
    output = runner.forward(lay_out([BatchEntry(0, ids, [1])], 16, feature_layers=(1, 0, -1)))
    with torch.inference_mode():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    expected = torch.cat([states[1][0], states[0][0], states[2][0]], dim=-1)
    assert output.features is not None
    assert output.logits.shape == (0, 211)
    assert torch.allclose(output.features, expected, atol=1e-4)
