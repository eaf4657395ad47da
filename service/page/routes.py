"""The page's files, and how an application gets them: `setup(app)`. No build step, and nothing from elsewhere."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import AsyncIterator
from importlib import resources

import msgspec
from aiohttp import ETag, web

from service.page.engine import engine_view
from service.page.markdown import style_sheet
from service.page.renderer import RENDERER, Renderer, markdown
from speculation.messages import SpeculationConfig

CONTENT_TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
    "json": "application/json",
}

SECURITY_HEADERS = {
    # Whatever a model, a client or a name brings to the page: it cannot run, load or send anything.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class PageFile(msgspec.Struct, frozen=True):
    """One file, in memory."""

    body: bytes
    compressed: bytes
    """The same in gzip."""
    content_type: str
    etag: str


PAGE_FILES = web.AppKey[dict[str, PageFile]]("page_files")


def setup(app: web.Application) -> None:
    """Add the page's routes."""
    app[PAGE_FILES] = load_files()
    app[RENDERER] = Renderer()
    app.add_routes(
        [
            web.get("/", index),
            web.get("/page/{name}", page_file),
            web.post("/page/markdown", markdown),
            web.get("/v1/engine", engine_view),
        ]
    )
    app.cleanup_ctx.append(renderer)


async def renderer(app: web.Application) -> AsyncIterator[None]:
    """What renders Markdown, until the service ends."""
    yield
    await app[RENDERER].close()


def load_files() -> dict[str, PageFile]:
    """Every file of the page by name; what speculation configs may hold, for its forms; and the colours of code."""
    files = {
        entry.name: _page_file(entry.name, entry.read_bytes())
        for entry in resources.files(__package__).iterdir()
        if entry.name.rpartition(".")[2] in CONTENT_TYPES
    }
    schema = msgspec.json.encode(msgspec.json.schema(SpeculationConfig))
    made = {"speculation.json": schema, "code.css": style_sheet().encode()}
    return files | {name: _page_file(name, body) for name, body in made.items()}


async def index(request: web.Request) -> web.Response:
    return _respond(request, "index.html")


async def page_file(request: web.Request) -> web.Response:
    """Raises `HTTPNotFound` for what is no file of the page."""
    return _respond(request, request.match_info["name"])


def _page_file(name: str, body: bytes) -> PageFile:
    compressed = gzip.compress(body, mtime=0)
    return PageFile(body, compressed, CONTENT_TYPES[name.rpartition(".")[2]], hashlib.sha256(body).hexdigest()[:32])


def _respond(request: web.Request, name: str) -> web.Response:
    """The file, or 304 to a browser that has it: it asks each time, so that a new version shows at once."""
    file = request.app[PAGE_FILES].get(name)
    if file is None:
        raise web.HTTPNotFound
    response = web.Response(headers={**SECURITY_HEADERS, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"})
    response.etag = ETag(file.etag, is_weak=True)  # one tag for both encodings
    if any(tag.value in {file.etag, "*"} for tag in request.if_none_match or ()):
        response.set_status(304)
        return response
    if "gzip" in request.headers.get("Accept-Encoding", ""):
        response.body = file.compressed
        response.headers["Content-Encoding"] = "gzip"
    else:
        response.body = file.body
    response.content_type, response.charset = file.content_type, "utf-8"
    return response
