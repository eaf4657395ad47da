"""POST /page/markdown: what a model writes, as the elements the page makes of it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import suppress

import msgspec
import structlog
from aiohttp import web

from service.bodies import received_body
from service.body_budget import SMALL_BODY_BYTES
from service.errors import ApiError
from service.tenants import TENANTS
from service.validation import parse_body

MAX_TEXT_BYTES = SMALL_BODY_BYTES
"""Largest body. The page shows a longer text as it is."""
RENDER_SECONDS = 5.0
"""Longest time for one text, the start of the process included; a process that takes longer is killed."""
IDLE_SECONDS = 60.0
"""Time without a text after which the process ends."""
MAX_TREE_BYTES = 16 * 1024 * 1024
MAX_WAITING = 32
COMMAND = (sys.executable, "-m", "service.page.markdown")

_log = structlog.get_logger("forerun.page")


class MarkdownBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /page/markdown."""

    text: str


class Renderer:
    """Renders Markdown in a process of its own, one text at a time; the process runs while there is work for it.

    A regular expression of a lexer that takes long so holds up neither answers nor other clients.
    """

    def __init__(self, command: Sequence[str] = COMMAND, render_seconds: float = RENDER_SECONDS) -> None:
        self._command = command
        self._render_seconds = render_seconds
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._process: asyncio.subprocess.Process | None = None
        self._end: asyncio.TimerHandle | None = None

    async def render(self, text: str) -> bytes:
        """The text's tree as JSON. Raises `ApiError` (503) where that takes too long or too many texts wait."""
        if self._num_waiting >= MAX_WAITING:
            raise ApiError.overloaded(f"{MAX_WAITING} texts wait to be rendered; try again shortly")
        self._num_waiting += 1
        try:
            async with self._turn:
                return await self._render(msgspec.json.encode(text) + b"\n")
        finally:
            self._num_waiting -= 1

    async def close(self) -> None:
        """End the process, if it runs."""
        if self._end is not None:
            self._end.cancel()
            self._end = None
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.kill()
        await process.communicate()

    async def _render(self, line: bytes) -> bytes:
        if self._end is not None:
            self._end.cancel()
        is_done = False
        try:
            async with asyncio.timeout(self._render_seconds):
                process = await self._started()
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(line)
                await process.stdin.drain()
                tree = await process.stdout.readline()
            is_done = tree.endswith(b"\n")
        except (TimeoutError, ConnectionError, ValueError) as error:
            _log.warning("text not rendered", reason=str(error) or f"longer than {self._render_seconds:g} s")
        finally:
            # Also where the client has left: what the process would still write is the answer to no other text.
            if not is_done:
                await asyncio.shield(self.close())
        if not is_done:
            raise ApiError.unavailable("the text could not be rendered; show it as it is", "not_rendered")
        self._end = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._stop)
        return tree

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            pipe = asyncio.subprocess.PIPE
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=pipe, stdout=pipe, limit=MAX_TREE_BYTES
            )
        return self._process

    def _stop(self) -> None:
        """Let the idle process end: it reads until its input ends."""
        self._end = None
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process = None


RENDERER = web.AppKey("renderer", Renderer)


async def markdown(request: web.Request) -> web.Response:
    """The tree of a text. Asks for a key where the service has keys, as every route that works for a client does."""
    request.app[TENANTS].identify(request.headers)
    async with received_body(request, MAX_TEXT_BYTES) as pieces:
        body = parse_body(b"".join(pieces), MarkdownBody)
    return web.Response(body=await request.app[RENDERER].render(body.text), content_type="application/json")
