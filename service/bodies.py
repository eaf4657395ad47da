"""Request bodies: read within a deadline, up to a size, and so that all of them together stay within a budget."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from aiohttp import web

from service.body_budget import SMALL_BODY_BYTES, Hold
from service.connections import connection_of
from service.context import FRONT
from service.errors import ApiError


async def read_body(request: web.Request) -> bytes:
    """The whole body of an operator's request, small enough to be decoded at once.

    Raises `ApiError`: 413, 408, 503; `RequestPayloadError` for a wrong encoding.
    """
    async with received_body(request, SMALL_BODY_BYTES) as pieces:
        return b"".join(pieces)


@asynccontextmanager
async def received_body(request: web.Request, max_bytes: int | None = None) -> AsyncIterator[list[bytes]]:
    """The whole body of a request, in the pieces in which it arrived, with its room in the budget.

    `max_bytes` lowers the limit of its size.

    Raises `ApiError`: 413, 408, 503; `RequestPayloadError` for a wrong encoding.
    """
    front = request.app[FRONT]
    most = front.max_body_bytes if max_bytes is None else min(front.max_body_bytes, max_bytes)
    announced = request.content_length
    if announced is not None and announced > most:
        raise too_large(most)
    if request.content.is_eof():
        yield [_checked(request.content.read_nowait(-1), most)]
        return
    is_plain = announced is not None and "Content-Encoding" not in request.headers
    num_bytes = announced if announced is not None and is_plain else most
    server = front.settings.server
    if num_bytes <= SMALL_BODY_BYTES:
        yield await _read(request, most, Hold(0, 0.0, None), server.body_seconds, server.stall_seconds)
        return
    async with AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(server.body_seconds):
                hold = await stack.enter_async_context(front.bodies.hold(num_bytes))
        except TimeoutError:
            message = f"{front.bodies.held} bytes of other bodies are being read, of at most {front.bodies.max_bytes}"
            raise ApiError.unavailable(f"{message}; try again shortly", "too_many_bodies") from None
        yield await _read(request, most, hold, server.body_seconds, server.stall_seconds)


def too_large(max_bytes: int) -> ApiError:
    """The error of a body over the limit."""
    return ApiError(413, f"the body is over the limit of {max_bytes} bytes", code="request_too_large")


async def _read(request: web.Request, most: int, hold: Hold, body_seconds: float, stall_seconds: float) -> list[bytes]:
    connection, content = connection_of(request), request.content
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + body_seconds
    pieces: list[bytes] = []
    num_bytes = 0
    if connection is not None:
        connection.set_receiving()
    try:
        async with asyncio.timeout_at(min(ends_at, loop.time() + stall_seconds)) as hold.deadline:
            while piece := await content.readany():
                pieces.append(piece)
                num_bytes += len(piece)
                if num_bytes > most:
                    raise too_large(most)
                await hold.take_turn()
                if not hold.is_given_up:
                    hold.deadline.reschedule(min(ends_at, loop.time() + stall_seconds))
    except TimeoutError:
        if connection is not None:
            connection.close()
        raise _too_slow(hold, num_bytes, body_seconds, stall_seconds) from None
    finally:
        hold.deadline = None
        if connection is not None:
            connection.set_busy()
    return pieces


def _too_slow(hold: Hold, num_bytes: int, body_seconds: float, stall_seconds: float) -> ApiError:
    headers = {"Connection": "close"}
    if hold.is_given_up:
        error = ApiError.unavailable(
            f"the body was arriving too slowly ({num_bytes} bytes so far) while others waited; try again",
            "too_many_bodies",
        )
        error.headers |= headers
        return error
    message = (
        f"{num_bytes} bytes of the body arrived and then no more; it must arrive within {body_seconds:g} s, "
        f"without a pause of {stall_seconds:g} s"
    )
    return ApiError(408, message, code="request_timeout", headers=headers)


def _checked(body: bytes, most: int) -> bytes:
    if len(body) > most:
        raise too_large(most)
    return body
