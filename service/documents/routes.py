"""GET /docs: the documents of the API and of operation as web pages, and how an application gets them: `setup(app)`."""

from __future__ import annotations

import html
import re
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import TYPE_CHECKING

from aiohttp import web

from service.page.routes import SECURITY_HEADERS

if TYPE_CHECKING:
    from markdown_it.token import Token

NAMES = ("api", "clients", "experiments", "operations")
"""Files of this folder, without their ending."""
_LINK = re.compile(r"([a-z]+)\.md(#.*)?")
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} · forerun</title>
<link rel="icon" href="../page/icon.svg">
<link rel="stylesheet" href="../page/documents.css">
</head>
<body>
<nav>{navigation}</nav>
<main>
{content}</main>
</body>
</html>
"""


def setup(app: web.Application) -> None:
    """Add the routes."""
    app.add_routes([web.get("/docs", first_document), web.get("/docs/{name}", document)])


async def first_document(_: web.Request) -> web.Response:
    """Redirects to the API's document, by a relative address: a proxy may serve all of this under a path of its own."""
    return web.Response(status=302, headers={"Location": "docs/api"})


async def document(request: web.Request) -> web.Response:
    """Raises `HTTPNotFound` for a name that is no document's."""
    name = request.match_info["name"]
    if name not in NAMES:
        raise web.HTTPNotFound
    headers = {**SECURITY_HEADERS, "Cache-Control": "no-cache"}
    return web.Response(text=rendered(name), content_type="text/html", headers=headers)


@cache
def rendered(name: str) -> str:
    """A document as a whole page."""
    from markdown_it import MarkdownIt  # here, since most services are never asked for a document

    source = resources.files(__package__).joinpath(f"{name}.md").read_text(encoding="utf-8")
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = markdown.parse(source)
    _add_anchors(tokens)
    _mend_links(tokens)
    content = markdown.renderer.render(tokens, markdown.options, {})
    links = " ".join(f'<a href="{each}">{each}</a>' for each in NAMES)
    title = next((token.content for token in tokens if token.type == "inline"), name)
    return _PAGE.format(title=html.escape(title), navigation=f'<a href="../">forerun</a> {links}', content=content)


def _add_anchors(tokens: list[Token]) -> None:
    """Give each heading the id that GitHub gives it."""
    for heading, text in pairwise(tokens):
        if heading.type == "heading_open":
            slug = re.sub(r"[^\w\- ]", "", text.content.lower()).replace(" ", "-")
            heading.attrSet("id", slug)


def _mend_links(tokens: list[Token]) -> None:
    """Point links between documents to their pages; a link to a file that is not shown becomes its text."""
    for token in tokens:
        _mend_links(token.children or [])
        if token.type != "link_open":
            continue
        target = str(token.attrGet("href") or "")
        found = _LINK.fullmatch(target)
        if found is not None and found[1] in NAMES:
            token.attrSet("href", f"{found[1]}{found[2] or ''}")
        elif not target.startswith(("http://", "https://", "#")):
            del token.attrs["href"]
