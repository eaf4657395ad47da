"""Answers to what never becomes a request: malformed HTTP, and errors outside every middleware."""

from __future__ import annotations

import re
from http import HTTPStatus

import structlog
from aiohttp import web
from aiohttp.http_exceptions import (
    BadHttpMethod,
    BadStatusLine,
    ContentLengthError,
    InvalidHeader,
    InvalidURLError,
    LineTooLong,
    TransferEncodingError,
)

from service.errors import ApiError

FIXED_HEADERS = {"Server": "forerun", "X-Content-Type-Options": "nosniff"}
"""Sent with every response."""

_REASONS: tuple[tuple[type[Exception], str], ...] = (
    (LineTooLong, "its first line or a header is too long"),
    (BadHttpMethod, "it begins with no HTTP method"),
    (InvalidURLError, "its target is no URL"),
    (InvalidHeader, "a header is invalid"),
    (ContentLengthError, "its body does not have the length it was to have"),
    (TransferEncodingError, "its transfer encoding is invalid"),
    (BadStatusLine, "its first line is invalid"),
)
_PARSER_WORDS = re.compile(
    r"([A-Za-z][A-Za-z '/-]{0,79}):\n"
    r"|((?:Missing|Duplicate) '[A-Za-z-]+' header|Received HTTPS traffic on an HTTP port)"
)
"""The parser's own words, which come before what it shows of the request."""

_log = structlog.get_logger("forerun.http")


class RequestHandler(web.RequestHandler):
    """aiohttp's protocol of one connection, whose own errors are answered and logged as the service's are.

    aiohttp logs what it could not parse with a traceback that shows the request's bytes, API keys included, and
    answers in plain text.
    """

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """A response that ends the connection. Raises ConnectionError where nothing can be answered any more."""
        if isinstance(exc, ConnectionError):  # the client left
            raise exc
        if status < HTTPStatus.INTERNAL_SERVER_ERROR:
            error = malformed(status, exc)
            _log.info("malformed request", status=status, reason=str(error))
        else:
            error = ApiError.internal()
            _log.error("request failed", status=status, exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("the response has begun; no other can follow")
        response = error_response(error)
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send a response. An `HTTPException` here was raised before any middleware, such as for `Expect`."""
        if isinstance(resp, web.HTTPException):
            resp = error_response(ApiError(resp.status, resp.reason))
        return await super().finish_response(request, resp, start_time)

    def log_exception(self, *args: object, **kw: object) -> None:
        """aiohttp's own report of a mistake, in a line of the service's log."""
        exc_info = kw.get("exc_info")
        if isinstance(exc_info, web.RequestPayloadError):  # the rest of a body whose request was answered
            _log.debug("rest of a body discarded", reason=str(exc_info))
            return
        _log.error("connection failed", reason=str(args[0]) if args else "", exc_info=exc_info)


def error_response(error: ApiError) -> web.Response:
    """An error as a response of its own."""
    headers = {**FIXED_HEADERS, **error.headers}
    return web.Response(status=error.status, body=error.encode(), content_type="application/json", headers=headers)


def malformed(status: int, error: BaseException | None) -> ApiError:
    """What is wrong with bytes that are no request, without repeating any of them: they may hold an API key."""
    reason = next((words for kind, words in _REASONS if isinstance(error, kind)), None)
    if reason is None:
        found = _PARSER_WORDS.match(str(getattr(error, "message", "")))
        reason = (found[1] or found[2]) if found is not None else "it is no HTTP request"
    return ApiError(status, f"the request is malformed: {reason}", code="malformed_request")
