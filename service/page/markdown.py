"""Markdown as a tree of elements that a browser can build without parsing markup, with highlighted code.

Raw HTML in the Markdown stays text, tags and attributes are those
listed here, and a link leads to http, https or mailto.

`python -m service.page.markdown` renders one JSON string a line on stdin to one JSON tree a line on stdout.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import msgspec
from markdown_it import MarkdownIt
from markdown_it.token import Token
from pygments.formatters import HtmlFormatter
from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.token import STANDARD_TYPES, _TokenType
from pygments.util import ClassNotFound

Node: TypeAlias = "str | list[Any]"
"""A text, or `[tag, attributes, children]`."""

TAGS = frozenset({
    *("p", "h1", "h2", "h3", "h4", "h5", "h6", "blockquote", "ul", "ol", "li", "hr", "br", "pre", "code", "em"),
    *("strong", "s", "a", "table", "thead", "tbody", "tr", "th", "td", "span"),
})  # fmt: skip
LINK_SCHEMES = frozenset({"http", "https", "mailto"})
STYLES = ("xcode", "lightbulb")
"""Of Pygments, for light and dark ground: those whose every colour can be read on it."""
MAX_CODE_LINE = 2000
"""Characters; a block with a longer line is not highlighted, since some lexers take quadratic time within a line."""


def render(text: str) -> list[Node]:
    """The blocks of a Markdown text."""
    return list(_Tree(_parser().parse(text)).children())


def style_sheet() -> str:
    """Rules for the classes that highlighted code has, in light and in dark."""
    light, dark = (_rules(style) for style in STYLES)
    return f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n"


def _rules(style: str) -> str:
    """A style's colours of text. Its grounds are left out: the page has its own."""
    formatter = HtmlFormatter(style=style, nobackground=True)
    lines = formatter.get_style_defs(".markdown pre").splitlines()
    return "\n".join(line for line in lines if line.startswith(".markdown pre .") and "background" not in line)


def _parser() -> MarkdownIt:
    # An image would have the reader's browser load something from elsewhere; it becomes a link.
    return MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"]).disable("image")


class _Tree:
    """Nodes of a flat list of tokens in which opening and closing ones enclose what is between them."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self._tokens = iter(tokens)

    def children(self) -> Iterator[Node]:
        """Nodes up to the token that closes what is open, or to the end."""
        for token in self._tokens:
            if token.nesting < 0:
                return
            if token.nesting > 0:
                inside = list(self.children())
                if token.hidden:  # the paragraph of a tight list
                    yield from inside
                else:
                    yield _element(token.tag, _attributes(token), inside)
            else:
                yield from _leaf(token)


def _leaf(token: Token) -> Iterable[Node]:
    match token.type:
        case "inline":
            return _Tree(token.children or ()).children()
        case "fence" | "code_block":
            language = token.info.split(maxsplit=1)[0] if token.info.strip() else ""
            label = {"data-language": language} if language else {}
            return [["pre", label, [["code", {}, list(_highlighted(token.content, language))]]]]
        case "code_inline":
            return [["code", {}, [token.content]]]
        case "softbreak":
            return ["\n"]
        case "hardbreak":
            return [["br", {}, []]]
        case "hr":
            return [["hr", {}, []]]
        case _:
            return [token.content] if token.content else []


def _element(tag: str, attributes: dict[str, str], children: list[Node]) -> Node:
    return [tag if tag in TAGS else "span", attributes, children]


def _attributes(token: Token) -> dict[str, str]:
    if token.type == "link_open":
        address = str(token.attrGet("href") or "")
        return {"href": address} if urlsplit(address).scheme.lower() in LINK_SCHEMES else {}
    if token.type == "ordered_list_open" and (start := token.attrGet("start")) is not None:
        return {"start": str(start)}
    align = str(token.attrGet("style") or "").removeprefix("text-align:")
    return {"data-align": align} if token.tag in {"th", "td"} and align in {"left", "center", "right"} else {}


def _highlighted(code: str, language: str) -> Iterator[Node]:
    """The code as texts and spans with the classes of Pygments."""
    lexer = _lexer(language)
    if lexer is None or max(map(len, code.splitlines()), default=0) > MAX_CODE_LINE:
        yield code
        return
    for kind, text in lexer.get_tokens(code):
        css = _class_of(kind)
        yield ["span", {"class": css}, [text]] if css else text


def _lexer(language: str) -> Lexer | None:
    """Changes nothing in the text but its colours."""
    try:
        return get_lexer_by_name(language, stripnl=False, ensurenl=False) if language else None
    except ClassNotFound:
        return None


def _class_of(kind: _TokenType) -> str:
    while kind not in STANDARD_TYPES and kind.parent is not None:
        kind = kind.parent
    return str(STANDARD_TYPES.get(kind, ""))


def main() -> None:
    for line in sys.stdin.buffer:
        tree = render(msgspec.json.decode(line, type=str))
        sys.stdout.buffer.write(msgspec.json.encode(tree) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
