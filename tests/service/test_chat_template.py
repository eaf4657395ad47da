"""Chat templates, against the rendering of the transformers library."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from service.chat_template import ChatTemplate, ChatTemplateError
from service.tokenizer import Tokenizer
from tests.service.conftest import byte_level_tokenizer, write_folder

MESSAGES = [
    {"role": "system", "content": "Be brief. <b>&</b>"},
    {"role": "user", "content": "  Größe?\n"},
    {"role": "assistant", "content": "1 m"},
    {"role": "user", "content": "日本"},
]
TEMPLATES = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "blocks are trimmed": (
        "{{ bos_token }}\n{% for m in messages %}\n    {% if m.role == 'user' %}\n[{{ m.content | trim }}]\n    "
        "{% endif %}\n{% endfor %}\n{{ eos_token }}"
    ),
    "loop controls": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}"
        "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}"
    ),
    "json and tests": (
        "{{ messages | tojson }}{% if tools is none %}-{% endif %}{% if tools %}+{% endif %}"
        "{{ messages[0] | tojson(indent=2) }}"
    ),
    "generation block": (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
    "undefined variables": (
        "{% if thinking is defined %}x{% endif %}{{ nothing }}{% set ns = namespace(a=1) %}{{ ns.a }}"
    ),
}


def theirs(folder: Path, messages: list[dict[str, str]], **options: Any) -> str:
    """What transformers renders, from the same folder."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(tmp_path: Path, name: str, add_generation_prompt: bool) -> None:
    """Every construct that chat templates use gives the same text."""
    folder = write_folder(tmp_path, byte_level_tokenizer(), TEMPLATES[name])
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "PreTrainedTokenizerFast"}))
    ours = ChatTemplate.load(folder)
    assert ours is not None
    assert ours.render(MESSAGES, add_generation_prompt=add_generation_prompt) == theirs(
        folder, MESSAGES, add_generation_prompt=add_generation_prompt
    )


@pytest.mark.parametrize("messages", [MESSAGES, MESSAGES[1:]])
def test_the_embedded_model_s_prompt_has_the_tokens_transformers_gives_it(
    embedded_folder: Path, messages: list[dict[str, str]]
) -> None:
    """Template and tokenizer together give transformers' token ids, with and without a system message."""
    from transformers import AutoTokenizer

    template, tokenizer = ChatTemplate.load(embedded_folder), Tokenizer.load(embedded_folder)
    assert template is not None
    protected = [{**message, "content": tokenizer.protect(message["content"])} for message in messages]
    expected = AutoTokenizer.from_pretrained(embedded_folder).apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.encode_rendered(template.render(protected)) == expected


def test_fields_that_name_no_special_token_are_passed_over(tmp_path: Path) -> None:
    """`add_bos_token` is a boolean, and other fields have shapes of their own; the special tokens are still found."""
    folder = write_folder(tmp_path, byte_level_tokenizer(), "{{ bos_token }} {{ eos_token }} {{ image_token }}.")
    path = folder / "tokenizer_config.json"
    odd = {"add_bos_token": True, "add_eos_token": False, "unk_token": None, "pad_token": 3, "cls_token": {"id": 1}}
    more = {"extra_special_tokens": {"image_token": "<image>"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | odd | more))
    template = ChatTemplate.load(folder)
    assert template is not None
    assert template.render(MESSAGES) == "<|im_start|> <|im_end|> <image>."


@pytest.mark.parametrize("found", [[], {"chat_template": 3}, {"chat_template": [{"name": "other"}, "x"]}])
def test_an_unknown_shape_of_the_configuration_is_no_template(tmp_path: Path, found: object) -> None:
    """A model whose `tokenizer_config.json` looks otherwise has no chat template, and is loaded."""
    folder = write_folder(tmp_path, byte_level_tokenizer())
    (folder / "tokenizer_config.json").write_text(json.dumps(found))
    assert ChatTemplate.load(folder) is None


def test_the_special_tokens_of_an_older_tokenizer_are_found(tmp_path: Path) -> None:
    """Tokens that only `special_tokens_map.json` names are given to the template."""
    folder = write_folder(tmp_path, byte_level_tokenizer(), "{{ bos_token }}{{ eos_token }}{{ unk_token }}")
    tokens = {"bos_token": "<other>", "unk_token": {"content": "<unk>"}}
    (folder / "special_tokens_map.json").write_text(json.dumps(tokens))
    template = ChatTemplate.load(folder)
    assert template is not None
    assert template.render(MESSAGES) == "<|im_start|><|im_end|><unk>"
    (folder / "special_tokens_map.json").write_bytes(b"{")
    template = ChatTemplate.load(folder)
    assert template is not None
    assert template.render(MESSAGES) == "<|im_start|><|im_end|>"


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    """Bytes that are neither JSON nor text are refused with their file."""
    folder = write_folder(tmp_path, byte_level_tokenizer())
    (folder / name).write_bytes(b"{\xff")
    with pytest.raises(ValueError, match=re.escape(str(folder / name))):
        ChatTemplate.load(folder)


def test_a_template_can_refuse() -> None:
    """`raise_exception` in a template ends as an error with its words."""
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        template.render(MESSAGES)


def test_a_template_cannot_reach_out_of_its_sandbox() -> None:
    """Attributes that lead to Python's internals, and changes to what it is given, are refused."""
    for source in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ messages[0].update(a=1) }}"):
        with pytest.raises(ChatTemplateError):
            ChatTemplate(source, {}).render(MESSAGES)


def test_variables_of_a_request_reach_the_template() -> None:
    """A request's variables are visible, and cannot replace the messages."""
    template = ChatTemplate("{{ enable_thinking }} {{ messages | length }}", {})
    assert template.render(MESSAGES, variables={"enable_thinking": False, "messages": []}) == "False 4"


def test_a_template_can_name_the_date() -> None:
    """`strftime_now` gives the current time in the asked format."""
    assert len(ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", {}).render([])) == 10


def test_a_broken_template_is_named_at_start() -> None:
    """A template that is no Jinja is an error when it is loaded, not when it is used."""
    with pytest.raises(ValueError, match="not valid Jinja"):
        ChatTemplate("{% for %}", {})


def test_a_folder_can_have_no_template_or_several(tmp_path: Path) -> None:
    """Without a template there is None; of several the one called default; a file of its own comes first."""
    folder = write_folder(tmp_path, byte_level_tokenizer(), template=None)
    assert ChatTemplate.load(folder) is None
    entries = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": entries}))
    loaded = ChatTemplate.load(folder)
    assert loaded is not None
    assert loaded.render([]) == "plain"
    (folder / "chat_template.jinja").write_text("file")
    loaded = ChatTemplate.load(folder)
    assert loaded is not None
    assert loaded.render([]) == "file"
