"""Messages to the text a chat model was trained on, by the template that comes with the model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec


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
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not valid Jinja: {error}") from error
        self._control_tokens = dict(control_tokens)

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate | None:
        """The template of a model folder: chat_template.jinja, else in tokenizer_config.json; None if there is none."""
        path = folder / "tokenizer_config.json"
        config: dict[str, Any] = msgspec.json.decode(path.read_bytes()) if path.is_file() else {}
        file = folder / "chat_template.jinja"
        source = file.read_text() if file.is_file() else _default_template(config.get("chat_template"))
        if source is None:
            return None
        tokens = {name: _content(value) for name, value in config.items() if name.endswith("_token") and value}
        return cls(source, tokens)

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


def _default_template(templates: str | list[dict[str, str]] | None) -> str | None:
    """Of several named templates, the one called default."""
    if not isinstance(templates, list):
        return templates
    return next((entry["template"] for entry in templates if entry["name"] == "default"), None)


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


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
