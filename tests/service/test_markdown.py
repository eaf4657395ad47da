"""Markdown of answers: as elements on an allow-list, rendered in a process that can be lost without harm."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.errors import ApiError
from service.page.markdown import TAGS, Node, render, style_sheet
from service.page.renderer import MAX_TEXT_BYTES, Renderer
from service.pool.settings import TenantSettings
from tests.e2e.test_browser_markup import SNIPPETS
from tests.service.conftest import Service, StartService

ATTRIBUTES = {"class", "href", "start", "data-align", "data-language"}


def elements(nodes: list[Node]) -> Iterator[tuple[str, dict[str, str]]]:
    for node in nodes:
        if not isinstance(node, str):
            tag, attributes, children = node
            yield tag, attributes
            yield from elements(children)


def text_of(nodes: list[Node]) -> str:
    return "".join(node if isinstance(node, str) else text_of(node[2]) for node in nodes)


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("a **b** `c`", [["p", {}, ["a ", ["strong", {}, ["b"]], " ", ["code", {}, ["c"]]]]]),
        ("- a\n- b", [["ul", {}, [["li", {}, ["a"]], ["li", {}, ["b"]]]]]),
        ("3. a", [["ol", {"start": "3"}, [["li", {}, ["a"]]]]]),
        ("a\\\nb\nc", [["p", {}, ["a", ["br", {}, []], "b", "\n", "c"]]]),
        ("a &amp; \\*b\\*", [["p", {}, ["a & *b*"]]]),
        ("[a](https://b.example/)", [["p", {}, [["a", {"href": "https://b.example/"}, ["a"]]]]]),
        ("[a](page/x)", [["p", {}, [["a", {}, ["a"]]]]]),
        ("![a](https://b.example/x.png)", [["p", {}, ["!", ["a", {"href": "https://b.example/x.png"}, ["a"]]]]]),
    ],
)
def test_markdown_becomes_elements(text: str, tree: list[Any]) -> None:
    """Blocks, spans, entities and links become elements; what would load something becomes a link."""
    assert render(text) == tree


def test_code_is_highlighted_and_keeps_every_character() -> None:
    """Code in a known language has the classes of Pygments; no language, an unknown one or a long line leaves text."""
    code = "\n\ndef f(x):\n\treturn  1 \n"
    (block,) = render(f"```python\n{code}```")
    assert block[:2] == ["pre", {"data-language": "python"}]
    assert ("span", {"class": "k"}) in elements([block])
    assert ".markdown pre .k {" in style_sheet()
    assert text_of([block]) == code
    for info in ("", "no-such-language"):
        assert [tag for tag, _ in elements(render(f"```{info}\n{code}```"))] == ["pre", "code"]
    assert [tag for tag, _ in elements(render(f"```python\n{'x' * 5000}\n```"))] == ["pre", "code"]


@pytest.mark.parametrize(
    "text", [*SNIPPETS, " ".join(SNIPPETS), "[x](javascript:a) <javascript:a> [y](data:text/html,a)"]
)
def test_no_element_or_attribute_is_off_the_list(text: str) -> None:
    """Raw HTML stays text, and links lead to http, https and mailto alone."""
    found = list(elements(render(text)))
    assert {tag for tag, _ in found} <= TAGS
    assert {name for _, attributes in found for name in attributes} <= ATTRIBUTES
    assert all(
        attributes["href"].startswith(("http:", "https:", "mailto:")) for _, attributes in found if "href" in attributes
    )


async def test_the_page_has_texts_rendered(service: Service) -> None:
    """Texts come back as trees; a body that is too large or of another shape is refused, and so are pages of others."""
    assert await service.post("/page/markdown", {"text": "*a*"}) == (200, [["p", {}, [["em", {}, ["a"]]]]])
    assert await service.post("/page/markdown", {"text": "é\n\n東"}) == (200, [["p", {}, ["é"]], ["p", {}, ["東"]]])
    assert (await service.post("/page/markdown", {"text": 1}))[0] == 400
    assert (await service.post("/page/markdown", {"text": "a" * MAX_TEXT_BYTES}))[0] == 413
    status, answer = await service.post("/page/markdown", {"text": "a"}, headers={"Origin": "http://evil.example"})
    assert (status, answer["error"]["code"]) == (403, "foreign_origin")


async def test_a_text_is_rendered_for_those_with_a_key(start_service: StartService, tmp_path: Path) -> None:
    """Where the service has API keys, rendering needs one of them."""
    keys = tmp_path / "keys"
    keys.write_text("somebody secret\n")
    service = await start_service(tenants=TenantSettings(api_keys_file=str(keys)))
    assert (await service.post("/page/markdown", {"text": "a"}))[0] == 401
    headers = {"Authorization": "Bearer secret"}
    assert (await service.post("/page/markdown", {"text": "a"}, headers=headers))[0] == 200


SLOW = """
import sys, time
for line in sys.stdin:
    if "slow" in line: time.sleep(60)
    if "die" in line: sys.exit()
    print(line.strip(), flush=True)
"""


async def test_a_text_that_takes_too_long_is_given_up() -> None:
    """The process is killed, or replaced where it died; the next text gets its own answer; closing ends it."""
    renderer = Renderer([sys.executable, "-c", SLOW], render_seconds=3)
    try:
        for text in ("slow", "die"):
            with pytest.raises(ApiError, match="could not be rendered") as caught:
                await renderer.render(text)
            assert caught.value.status == 503
            assert await renderer.render("a") == b'"a"\n'
        waiting = asyncio.create_task(renderer.render("slow"))
        await asyncio.sleep(0.1)
        waiting.cancel()
        assert await renderer.render("b") == b'"b"\n'
        assert sorted(await asyncio.gather(*(renderer.render(text) for text in "cd"))) == [b'"c"\n', b'"d"\n']
        process = renderer._process
        assert process is not None
    finally:
        await renderer.close()
    assert process.returncode is not None
