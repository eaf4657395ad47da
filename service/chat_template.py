"""Messages to the text a chat model was trained on, by the template that comes with the model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec

SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""Fields of `tokenizer_config.json` that name a special token (transformers' `SPECIAL_TOKENS_ATTRIBUTES`)."""

TOOL_MARK = "look_up_0"
"""Name of the tool in the conversation that shows what a template renders."""
RESULT_MARK = "result-0"
"""The tool's result there."""
_CALL = {"id": "call00000", "type": "function", "function": {"name": TOOL_MARK, "arguments": {"key": "value"}}}
_TOOL_CONVERSATION: tuple[Mapping[str, Any], ...] = (
    {"role": "user", "content": "question"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": RESULT_MARK, "name": TOOL_MARK, "tool_call_id": "call00000"},
)
_RESULT_CONVERSATION = (_TOOL_CONVERSATION[0], {"role": "assistant", "content": "call"}, _TOOL_CONVERSATION[2])

QUESTION = "forerunquestion"
ANSWER = {"role": "assistant", "content": "forerunanswer"}
"""Messages whose contents are found again in a rendered conversation."""


class ChatTemplateError(ValueError):
    """The template refuses these messages, or cannot render them."""


class ChatTemplate:
    """A Jinja template, rendered in the environment the `transformers` library gives chat templates.

    That is: an immutable sandbox, `trim_blocks` and `lstrip_blocks`, `break` and `continue`, the `generation` block,
    the filter `tojson` without HTML escapes, `raise_exception` and `strftime_now`; and as variables the messages and
    the names of the model's control tokens (`bos_token`, …). Safe to use from several threads.
    """

    def __init__(self, source: str, control_tokens: Mapping[str, str]) -> None:
        """Raises ValueError if `source` is not a template."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self.source = source
        """The template itself."""
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not valid Jinja: {error}") from error
        self._control_tokens = dict(control_tokens)

    @cached_property
    def renders_tool_calls(self) -> bool:
        """Whether the tool calls of an assistant's turn appear in the text."""
        return TOOL_MARK in self._rendered_or_empty(_TOOL_CONVERSATION[:2])

    @cached_property
    def renders_tool_results(self) -> bool:
        """Whether messages of the role `tool` appear in the text."""
        text = self._rendered_or_empty(_TOOL_CONVERSATION)
        return RESULT_MARK in (text or self._rendered_or_empty(_RESULT_CONVERSATION))

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate | None:
        """The template of a model folder: chat_template.jinja, else in tokenizer_config.json; None if there is none.

        Raises ValueError naming the file that cannot be read.
        """
        config = _read_object(folder / "tokenizer_config.json")
        file = folder / "chat_template.jinja"
        try:
            source = file.read_text("utf-8") if file.is_file() else _default_template(config.get("chat_template"))
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{file} cannot be read: {error}") from error
        if source is None:
            return None
        older: dict[str, Any] = {}
        with suppress(ValueError):
            older = _read_object(folder / "special_tokens_map.json")
        return cls(source, _special_tokens(older) | _special_tokens(config))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. Raises `ChatTemplateError` with the template's own words if it refuses the messages."""
        values: dict[str, Any] = {**self._control_tokens, **(variables or {})}
        values |= {"messages": messages, "tools": None, "documents": None}
        try:
            return self._template.render(values, add_generation_prompt=add_generation_prompt)
        except _REFUSALS as error:
            raise ChatTemplateError(str(error) or type(error).__name__) from error

    def _rendered_or_empty(self, messages: Sequence[Mapping[str, Any]]) -> str:
        try:
            return self.render(messages, add_generation_prompt=False)
        except ChatTemplateError:
            return ""

    def after_answer(self) -> str:
        """The text that the template puts after an assistant's answer; empty where that cannot be told.

        It comes from a conversation that ends with the answer, or, where the template writes nothing after the last
        turn, from one that goes on.
        """
        question = {"role": "user", "content": QUESTION}
        for messages in ([question, ANSWER], [question, ANSWER, question]):
            _, found, rest = self._render_or_nothing(messages).rpartition(ANSWER["content"])
            if found and rest.strip():
                return rest
        return ""

    def _render_or_nothing(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The rendered text, without a generation prompt; empty where the template raises."""
        try:
            return self.render(messages, add_generation_prompt=False)
        except Exception:  # noqa: BLE001 - a template may raise anything, and is of use without this
            return ""


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is no file, or something else in it.

    Raises ValueError for a file that is not JSON.
    """
    try:
        found: object = msgspec.json.decode(path.read_bytes()) if path.is_file() else None
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"{path} is not readable JSON: {error}") from error
    return found if isinstance(found, dict) else {}


def _default_template(templates: object) -> str | None:
    """A template as `tokenizer_config.json` holds it: a text, or several with names, of which one is the default."""
    if isinstance(templates, list):
        named = {entry.get("name"): entry.get("template") for entry in templates if isinstance(entry, dict)}
        templates = named.get("default")
    return templates if isinstance(templates, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the special tokens that `tokenizer_config.json` names, as transformers hands them to chat templates.

    A model may have names of its own, in `extra_special_tokens`. Values that are no token are passed over: other
    fields end in `_token` too, such as `add_bos_token`, which is a boolean.
    """
    extra = config.get("extra_special_tokens")
    named = {name: config.get(name) for name in SPECIAL_TOKENS} | (extra if isinstance(extra, dict) else {})
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str) and text}


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


_REFUSALS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    LookupError,
    MemoryError,
    RecursionError,
)
"""What a template raises over messages or variables that it cannot work with."""


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}` marks an assistant's text for training; here it is just its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))
