"""Converting GGUF models that lack something, hold something wrong, or are split into several files."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFValueType
from safetensors.torch import load_file
from tokenizers import Tokenizer, pre_tokenizers

from target.embedded import cached_conversion
from target.errors import CheckpointError
from target.gguf_file import GGUFModel, convert_gguf
from target.hf_config import read_config
from target.sampling_defaults import read_sampling_defaults
from tests.target.conftest import make_model
from tests.target.test_gguf_file import Fields, write_gguf

UINT, FLOAT, STRING, ARRAY = GGUFValueType.UINT32, GGUFValueType.FLOAT32, GGUFValueType.STRING, GGUFValueType.ARRAY
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [f"<|{i}|>" for i in range(5)] + LETTERS[:200] + ["he"]
TOKENIZER: Fields = {
    "tokenizer.ggml.model": ("gpt2", STRING),
    "tokenizer.ggml.pre": ("gpt-2", STRING),
    "tokenizer.ggml.tokens": (TOKENS, ARRAY),
    "tokenizer.ggml.token_type": ([3] * 5 + [1] * 201, ARRAY),
    "tokenizer.ggml.merges": (["h e"], ARRAY),
    "tokenizer.ggml.bos_token_id": (1, UINT),
    "tokenizer.ggml.eos_token_id": (2, UINT),
}


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model("llama", head_dim=16)


def ignore(_: str) -> None:
    """No progress is shown."""


def convert(folder: Path, model: Any, **fields: Any) -> Path:
    """Write a file with a tokenizer and other `fields` (`__` is a dot), and convert it."""
    given = {name.replace("__", "."): value for name, value in fields.items()}
    write_gguf(folder / "model.gguf", model, "llama", fields=TOKENIZER | given)
    convert_gguf(folder / "model.gguf", folder / "converted", ignore)
    return folder / "converted"


def test_a_file_becomes_a_folder(model: Any, tmp_path: Path) -> None:
    """Config, tokenizer, sampling defaults and every token that ends a text or a turn are there."""
    folder = convert(
        tmp_path,
        model,
        tokenizer__ggml__eot_token_id=(3, UINT),
        tokenizer__ggml__eom_token_id=(4, UINT),
        general__sampling__temp=(0.6, FLOAT),
    )
    config = read_config(folder)
    assert config.eos_token_ids == (2, 3, 4)
    assert config.bos_token_id == 1
    defaults, problems = read_sampling_defaults(folder)
    assert (defaults.temperature, defaults.source, problems) == (0.6, "general.sampling.* (GGUF)", [])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("<|3|>he", add_special_tokens=False).tokens == ["<|3|>", "he"]


def test_a_token_that_is_not_there_ends_nothing(model: Any, tmp_path: Path) -> None:
    """The largest 32-bit number, which stands for no token, is no stop token."""
    folder = convert(tmp_path, model, tokenizer__ggml__eot_token_id=(2**32 - 1, UINT))
    assert read_config(folder).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokenizer__ggml__tokens": None}, r"lacks tokenizer\.ggml\.tokens: it has no tokenizer"),
        ({"tokenizer__ggml__merges": None}, r"lacks tokenizer\.ggml\.merges: it has no tokenizer"),
        ({"tokenizer__ggml__model": None}, r"lacks tokenizer\.ggml\.model: it has no tokenizer"),
        (
            {"tokenizer__ggml__model": None, "tokenizer__ggml__tokens": None},
            r"lacks tokenizer\.ggml\.model and tokenizer\.ggml\.tokens: it has no tokenizer",
        ),
        ({"tokenizer__ggml__tokens": ("a", STRING)}, r"tokenizer\.ggml\.tokens is no array of strings"),
        ({"tokenizer__ggml__tokens": ([1, 2], ARRAY)}, r"tokenizer\.ggml\.tokens is no array of strings"),
        ({"tokenizer__ggml__merges": (7, UINT)}, r"tokenizer\.ggml\.merges is no array of strings"),
        ({"tokenizer__ggml__merges": (["h"], ARRAY)}, r"model\.gguf: the tokenizer cannot be converted"),
        ({"tokenizer__ggml__eos_token_id": ("2", STRING)}, r"eos_token_id is '2'; it must be a token id"),
        ({"tokenizer__ggml__eot_token_id": (900, UINT)}, r"eot_token_id is 900; it must be below 206, the number of"),
        ({"tokenizer__ggml__padding_token_id": (900, UINT)}, r"padding_token_id is 900; it must be below 206"),
        ({"llama__embedding_length": None}, r"lacks llama\.embedding_length, which its architecture needs"),
        ({"llama__embedding_length": ("64", STRING)}, r"llama\.embedding_length is '64'; it must be a positive whole"),
        ({"llama__attention__head_count": (0, UINT)}, r"head_count is 0; it must be a positive whole number"),
        (
            {"llama__attention__head_count_kv": ([2, 4], ARRAY)},
            r"head_count_kv is \[2, 4\]; it must be a positive whole number",
        ),
        ({"llama__attention__head_count": (7, UINT)}, r"attn_q\.weight has \d+ rows, which are not 7 heads"),
        ({"llama__attention__layer_norm_rms_epsilon": None}, r"lacks llama\.attention\.layer_norm_rms_epsilon"),
        ({"llama__rope__freq_base": ("x" * 500, STRING)}, r"rope\.freq_base is 'x+…; it must be a positive number$"),
        ({"llama__rope__freq_base": (float("nan"), FLOAT)}, r"rope\.freq_base is nan; it must be a positive number"),
        ({"general__architecture": (["llama"], ARRAY)}, r"general\.architecture is \['llama'\]; supported are llama"),
    ],
)
def test_what_is_missing_or_of_a_wrong_type_is_named(
    model: Any, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    """A key that is missing or cannot be used is named in one sentence with the file."""
    with pytest.raises(CheckpointError, match=message) as raised:
        convert(tmp_path, model, **fields)
    assert str(raised.value).startswith(str(tmp_path / "model.gguf"))


def test_a_tensor_of_an_unknown_name_is_named(model: Any, tmp_path: Path) -> None:
    """Also one without a dot in its name."""
    for name in ("foo", "blk__0", "blk", "blk__0__other__weight"):
        extra: dict[str, Any] = {name: torch.zeros(2, 2).numpy()}
        write_gguf(tmp_path / "model.gguf", model, "llama", **extra)
        with pytest.raises(CheckpointError, match=rf"the tensor {name.replace('__', '.')} has no place in a llama"):
            list(GGUFModel(tmp_path / "model.gguf").tensors())


def test_a_text_that_is_not_utf_8_is_named(model: Any, tmp_path: Path) -> None:
    """Bytes that are no text are refused with the key that holds them."""
    path = tmp_path / "model.gguf"
    write_gguf(path, model, "llama")
    path.write_bytes(path.read_bytes().replace(b"llama", b"ll\xffma", 1))
    with pytest.raises(CheckpointError, match=r"general\.architecture is not UTF-8 text"):
        GGUFModel(path)


def test_damaged_files_raise_no_other_error(model: Any, tmp_path: Path) -> None:
    """Whatever byte of the header is another, the file is read or refused with a `CheckpointError`."""
    path = tmp_path / "model.gguf"
    write_gguf(path, model, "llama", fields={**TOKENIZER, "tokenizer.ggml.merges": (["h e"], ARRAY)})
    content = path.read_bytes()
    draw = random.Random(1)
    refused = 0
    for _ in range(150):
        place = draw.randrange(0, 700)
        path.write_bytes(content[:place] + bytes([draw.randrange(256)]) + content[place + 1 :])
        try:
            source = GGUFModel(path)
            source.require_tokenizer()
            source.config()
            source.sampling_fields()
        except CheckpointError:
            refused += 1
    assert refused > 20


@pytest.fixture
def parts(model: Any, tmp_path: Path) -> Iterator[list[Path]]:
    """A model that is split into files, in order."""
    write_gguf(tmp_path / "mine.gguf", model, "llama", fields=TOKENIZER, split_max_tensors=8)
    found = sorted(tmp_path.glob("mine-*.gguf"))
    assert len(found) == 3
    assert found[0].name == "mine-00001-of-00003.gguf"
    yield found
    for path in tmp_path.glob("*.gguf"):
        path.unlink()


@pytest.mark.parametrize("number", [0, 2])
def test_a_split_model_is_joined(model: Any, parts: list[Path], tmp_path: Path, number: int) -> None:
    """Named by whichever part, all of its files make the folder that the whole file makes, once."""
    cache = tmp_path / "cache"
    (tmp_path / "whole").mkdir()
    whole = convert(tmp_path / "whole", model)
    joined = cached_conversion(parts[number], ignore, cache)
    assert joined.name.startswith("mine-")
    assert "00001" not in joined.name
    expected, found = load_file(whole / "model.safetensors"), load_file(joined / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (joined / name).read_text() == (whole / name).read_text()
    assert cached_conversion(parts[1], pytest.fail, cache) == joined


def test_missing_parts_are_named(parts: list[Path], tmp_path: Path) -> None:
    """The error says which files are missing, where, and how many there should be."""
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"^mine-00002-of-00003\.gguf is missing in .*split into 3 files"):
        cached_conversion(parts[0], ignore, tmp_path / "cache")
    parts[0].unlink()
    with pytest.raises(CheckpointError, match=r"^mine-00001-of-00003.gguf, mine-00002-of-00003\.gguf are missing"):
        cached_conversion(parts[2], ignore, tmp_path / "cache")
    with pytest.raises(CheckpointError, match=r"mine-00001-of-00003\.gguf does not exist"):
        cached_conversion(parts[0], ignore, tmp_path / "cache")
    many = tmp_path / "other-00001-of-00009.gguf"
    many.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"other-00004-of-00009\.gguf and 5 more are missing"):
        cached_conversion(many, ignore, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_part_under_another_name_says_which_it_must_have(parts: list[Path], tmp_path: Path) -> None:
    """A renamed part cannot be joined; the error has the name it needs."""
    for number in (0, 1):
        renamed = parts[number].rename(tmp_path / "renamed.gguf")
        message = rf"is one of 3 files of a split model; its name must be NAME-0000{number + 1}-of-00003\.gguf"
        with pytest.raises(CheckpointError, match=message):
            cached_conversion(renamed, ignore, tmp_path / "cache")


def test_parts_in_another_order_are_refused(parts: list[Path], tmp_path: Path) -> None:
    """A part whose content is that of another number is named."""
    shutil.copyfile(parts[1], parts[2])
    with pytest.raises(CheckpointError, match=r"mine-00003-of-00003\.gguf: split\.no is 1 and split\.count 3; by its"):
        cached_conversion(parts[0], ignore, tmp_path / "cache")


def test_parts_of_different_models_are_refused(model: Any, parts: list[Path], tmp_path: Path) -> None:
    """Where the tensors of all parts are not as many as each says, they are not of one conversion."""
    (tmp_path / "other").mkdir()
    extra: dict[str, Any] = {"rope_freqs__weight": torch.ones(8).numpy()}
    write_gguf(tmp_path / "other/mine.gguf", model, "llama", fields=TOKENIZER, split_max_tensors=8, **extra)
    shutil.copyfile(tmp_path / "other/mine-00003-of-00003.gguf", parts[2])
    with pytest.raises(CheckpointError, match=r"split\.tensors\.count is \d+, but the 3 files of the model hold \d+"):
        cached_conversion(parts[0], ignore, tmp_path / "cache")


def test_a_whole_file_named_as_a_part_is_read(model: Any, tmp_path: Path) -> None:
    """Names that only look like a part's are no trouble."""
    for name in ("mine-00001-of-00001.gguf", "mine-00000-of-00002.gguf"):
        write_gguf(tmp_path / name, model, "llama", fields=TOKENIZER)
        assert GGUFModel(tmp_path / name).config()["num_hidden_layers"] == model.config.num_hidden_layers
