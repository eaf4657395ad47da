"""What every request has, whatever its route: an id, a line in the log, and errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from http import HTTPStatus

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler

from service.cross_origin import ORIGINS
from service.errors import ApiError, cut, shorten
from service.event_stream import ClientStalledError, drop
from service.front import Front
from service.hosts import AllowedHosts, is_own_origin
from service.peers import PEER, TrustedProxies
from service.request_handler import FIXED_HEADERS, error_response
from service.tenants import TENANT
from service.unserved_paths import hint_of

FRONT = web.AppKey("front", Front)
HOSTS = web.AppKey[AllowedHosts | None]("hosts")
"""Names under which the service may be reached; None where API keys make the name irrelevant."""
REQUEST_ID = web.RequestKey("request_id", str)
ARRIVED_AT = web.RequestKey("arrived_at", float)
"""By `time.perf_counter`."""
PROXIES = web.AppKey("proxies", TrustedProxies)
FAILURE = web.RequestKey("failure", ApiError)
"""Why a request was refused, or failed."""

QUIET = ("/health", "/v1/health", "/ping", "/metrics", "/page/", "/v1/audit", "/v1/engine", "/v1/experiments")
"""Beginnings of paths that are asked every few seconds, by machines and by the page: not worth a line."""

CLIENT_LEFT = 499
"""The status under which a departure is counted; nobody is there to see it."""

MAX_LOGGED_PATH = 256
"""Most characters of a request's path in errors and log lines."""
_ACCEPTABLE_ID = re.compile(r"[\x21-\x7e]{1,128}")
_log = structlog.get_logger("forerun.http")


class BrokenResponseError(ConnectionError):
    """A handler failed after its response had begun: no other can follow, and the connection was closed."""


@web.middleware
async def request_context(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give a request its id, and its outcome a line in the log and a count."""
    given = request.headers.get("X-Request-Id", "")
    request_id = given if _ACCEPTABLE_ID.fullmatch(given) else uuid.uuid4().hex
    request[REQUEST_ID], request[ARRIVED_AT] = request_id, time.perf_counter()
    peer = request[PEER] = request.app[PROXIES].peer_of(request)
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(request_id=request_id)
    front = request.app[FRONT]
    status = CLIENT_LEFT
    try:
        response = await handler(request)
        status = response.status
    except BrokenResponseError:
        status = 500
        raise
    except ClientStalledError:  # it did not leave; whoever dropped it has counted that
        raise
    except (asyncio.CancelledError, ConnectionError):
        front.metrics.departures.inc()
        raise
    finally:
        seconds = round(time.perf_counter() - request[ARRIVED_AT], 6)
        is_quiet = (
            request.path.startswith(QUIET if request.method == "GET" else "/page/")
            and status < HTTPStatus.BAD_REQUEST
            and not front.settings.server.access_log
        )
        log = _log.debug if is_quiet else _log.info
        log(
            "request",
            method=cut(request.method),
            path=cut(request.path, MAX_LOGGED_PATH),
            status=status,
            seconds=seconds,
            client=peer.address,
            **_details(request),
        )
        route = request.match_info.route.resource
        front.metrics.requests.labels(route.canonical if route is not None else "unknown", str(status)).inc()
    return response


def _details(request: web.Request) -> dict[str, str]:
    """What else the log says of a request: its tenant, and of one that was refused the error's code and field."""
    failure, tenant = request.get(FAILURE), request.get(TENANT)
    body = None if failure is None else failure.body
    found = {
        "tenant": None if tenant is None else tenant.name,
        "code": None if body is None else body.code,
        "param": None if body is None else body.param,
    }
    return {name: value for name, value in found.items() if value}


@web.middleware
async def openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn whatever a handler raises into an error response.

    Raises `BrokenResponseError` where part of a response was sent, and ConnectionError where the client has left.
    """
    try:
        return await handler(request)
    except ApiError as error:
        failure = error
    except web.HTTPException as error:
        failure = _from_http(request, error)
    except web.RequestPayloadError:
        failure = _unreadable(request)
        request.protocol.close()  # what follows cannot be told from the rest of the body
    except Exception as error:
        if isinstance(error, ConnectionError) and has_left(request):
            raise
        _log.exception("handler failed", path=cut(request.path, MAX_LOGGED_PATH))
        failure = ApiError.of(error)
    request[FAILURE] = failure
    if request.writer.output_size > 0:
        # A second head would be read as part of the first response's body, or as a frame of a WebSocket.
        drop(request)
        raise BrokenResponseError(str(failure))
    return error_response(failure)


def has_left(request: web.BaseRequest) -> bool:
    """Whether the client's connection is closed, or about to be."""
    return request.transport is None or request.transport.is_closing()


@web.middleware
async def allowed_hosts_only(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer under allowed names alone. Raises `ApiError` (403) for another `Host`.

    What has no `Host` (HTTP/1.0) is no browser. A request's target may name a host as well; then both are compared.
    """
    allowed = request.app[HOSTS]
    if allowed is not None:
        for host in (request[PEER].host, request.headers.get("Host", request.host), request.host):
            if not allowed.allows(host):
                shown = cut(host)
                _log.info("host refused", host=shown)
                message = (
                    f"this service does not answer as {shown!a}; "
                    "use an address or localhost, or name the host in --allowed-hosts"
                )
                raise ApiError(403, message, code="foreign_host")
    return await handler(request)


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
    host, schemes = request[PEER].host, request.headers.getall("X-Forwarded-Proto", ["https"] if request.secure else [])
    scheme = ",".join(schemes) or None
    for origin in request.headers.getall("Origin", ()):
        if not is_own_origin(origin, host, scheme) and not request.app[ORIGINS].allows(origin):
            message = (
                f"cross-origin request from {cut(ascii(origin))} refused; serve the page from this service's own "
                "address, or name its origin in --allowed-origins"
            )
            raise ApiError(403, message, code="foreign_origin")


async def add_fixed_headers(_: web.Request, response: web.StreamResponse) -> None:
    """Signal handler: every response says what it is from, and that its type is not to be guessed."""
    response.headers.update(FIXED_HEADERS)


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler: the response, streamed or not, names its request."""
    if REQUEST_ID in request:
        response.headers["X-Request-Id"] = request[REQUEST_ID]


def _from_http(request: web.Request, error: web.HTTPException) -> ApiError:
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        most = request.app[FRONT].max_body_bytes
        return ApiError(413, f"the body is over the limit of {most} bytes", code="request_too_large")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{cut(request.path, MAX_LOGGED_PATH)} does not take {cut(request.method)}; it takes {allowed}"
        return ApiError(405, message, code="method_not_allowed", headers={"Allow": allowed})
    if isinstance(error, web.HTTPNotFound):
        path = cut(request.path, MAX_LOGGED_PATH)
        hint = hint_of(request.path) or "GET /docs lists the routes"
        return ApiError(404, f"there is nothing at {path}: {hint}", code="unknown_url")
    return ApiError(error.status, error.reason)


def _unreadable(request: web.Request) -> ApiError:
    """400: a body that its own headers describe wrongly, or that was cut off."""
    encoding = request.headers.get("Content-Encoding")
    if encoding is None:
        param, message = None, "the body cannot be read: it is cut off, or wrongly framed"
    else:
        shown = shorten(encoding)
        param, message = "Content-Encoding", f"Content-Encoding is {shown}: the body is not a valid {shown} stream"
    return ApiError(400, message, param=param, code="invalid_body", headers={"Connection": "close"})
