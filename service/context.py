"""What every request has, whatever its route: an id, a line in the log, and errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import re
import time
import uuid

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler

from service.errors import ApiError, cut, shorten
from service.front import Front

FRONT = web.AppKey("front", Front)
REQUEST_ID = web.RequestKey("request_id", str)
ARRIVED_AT = web.RequestKey("arrived_at", float)
"""By `time.perf_counter`."""

QUIET = ("/health/", "/metrics", "/page/", "/v1/audit", "/v1/engine", "/v1/experiments")
"""Beginnings of paths that are asked every few seconds, by machines and by the page: not worth a line."""

CLIENT_LEFT = 499
"""The status under which a departure is counted; nobody is there to see it."""

MAX_LOGGED_PATH = 256
"""Most characters of a request's path in errors and log lines."""
_ACCEPTABLE_ID = re.compile(r"[\x21-\x7e]{1,128}")
_log = structlog.get_logger("forerun.http")


@web.middleware
async def request_context(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give a request its id, and its outcome a line in the log and a count."""
    given = request.headers.get("X-Request-Id", "")
    request_id = given if _ACCEPTABLE_ID.fullmatch(given) else uuid.uuid4().hex
    request[REQUEST_ID], request[ARRIVED_AT] = request_id, time.perf_counter()
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(request_id=request_id)
    front = request.app[FRONT]
    status = CLIENT_LEFT
    try:
        response = await handler(request)
        status = response.status
    except asyncio.CancelledError:
        front.metrics.departures.inc()
        raise
    finally:
        seconds = round(time.perf_counter() - request[ARRIVED_AT], 6)
        is_quiet = request.method == "GET" and request.path.startswith(QUIET)
        log = _log.debug if is_quiet else _log.info
        log(
            "request",
            method=cut(request.method),
            path=cut(request.path, MAX_LOGGED_PATH),
            status=status,
            seconds=seconds,
        )
        route = request.match_info.route.resource
        front.metrics.requests.labels(route.canonical if route is not None else "unknown", str(status)).inc()
    return response


@web.middleware
async def openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn whatever a handler raises into an error response."""
    try:
        return await handler(request)
    except ApiError as error:
        return error_response(error)
    except web.HTTPException as error:
        return error_response(_from_http(request, error))
    except web.RequestPayloadError:
        response = error_response(_unreadable(request))
        response.force_close()  # what follows on this connection cannot be told from the rest of the body
        return response
    except ConnectionError:
        raise
    except Exception:  # noqa: BLE001 - the last resort: the client gets an answer, the log the traceback
        _log.exception("handler failed", path=cut(request.path, MAX_LOGGED_PATH))
        return error_response(ApiError.internal())


@web.middleware
async def own_pages_only(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let no page of somebody else's change anything, or have anything computed, through its reader's browser."""
    if request.method not in {"GET", "HEAD", "OPTIONS"}:
        check_origin(request)
    return await handler(request)


def check_origin(request: web.Request) -> None:
    """Raises `ApiError` (403) if a browser asks for a page of somebody else's.

    Browsers let any page open a socket or post a text to any address, this machine's own included. What is no browser
    names no origin.
    """
    origin = request.headers.get("Origin")
    if origin is not None and origin.rpartition("://")[2] != request.host:
        raise ApiError(403, f"a page of {origin!a} may not use this service", code="foreign_origin")


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler: the response, streamed or not, names its request."""
    if REQUEST_ID in request:
        response.headers["X-Request-Id"] = request[REQUEST_ID]


def error_response(error: ApiError) -> web.Response:
    """An error as a response of its own."""
    return web.Response(
        status=error.status, body=error.encode(), content_type="application/json", headers=error.headers
    )


def _from_http(request: web.Request, error: web.HTTPException) -> ApiError:
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        most = request.app[FRONT].settings.limits.max_body_bytes
        return ApiError(413, f"the body is over the limit of {most} bytes", code="request_too_large")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{cut(request.path, MAX_LOGGED_PATH)} does not take {cut(request.method)}; it takes {allowed}"
        return ApiError(405, message, code="method_not_allowed", headers={"Allow": allowed})
    if isinstance(error, web.HTTPNotFound):
        path = cut(request.path, MAX_LOGGED_PATH)
        return ApiError(404, f"there is nothing at {path}; docs/api.md lists the routes", code="unknown_url")
    return ApiError(error.status, error.reason)


def _unreadable(request: web.Request) -> ApiError:
    """400: a body that its own headers describe wrongly, or that was cut off."""
    encoding = request.headers.get("Content-Encoding")
    if encoding is None:
        return ApiError.invalid(None, "the body cannot be read: it is cut off, or wrongly framed", code="invalid_body")
    message = f"Content-Encoding is {shorten(encoding)}: the body is not a valid {shorten(encoding)} stream"
    return ApiError.invalid("Content-Encoding", message, code="invalid_body")
