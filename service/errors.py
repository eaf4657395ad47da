"""What a client is told when something is wrong: OpenAI's error shape, on every protocol."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

import msgspec


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The inside of `{"error": …}`, as OpenAI's clients expect it."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorEnvelope(msgspec.Struct, frozen=True):
    """The whole body of an error response."""

    error: ErrorBody


class ApiError(Exception):
    """Ends a request with an HTTP status and a body that says what is wrong and what would be right."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",  # noqa: A002 - the wire's own word
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = ErrorBody(message=message, type=type, param=param, code=code)
        self.headers = headers or {}

    @classmethod
    def invalid(cls, param: str | None, message: str, *, code: str | None = "invalid_value") -> ApiError:
        """400: the client can mend `param`."""
        return cls(400, message, param=param, code=code)

    @classmethod
    def overloaded(cls, message: str, retry_after_seconds: int = 1) -> ApiError:
        """429: the same request will do, later."""
        headers = {"Retry-After": str(retry_after_seconds)}
        return cls(429, message, type="rate_limit_error", code="overloaded", headers=headers)

    @classmethod
    def unavailable(cls, message: str, code: str, retry_after_seconds: int = 1) -> ApiError:
        """503: no fault of the client's, and it will pass."""
        headers = {"Retry-After": str(retry_after_seconds)}
        return cls(503, message, type="service_unavailable_error", code=code, headers=headers)

    @classmethod
    def internal(cls) -> ApiError:
        """500: a mistake of ours; the log has it under the request's id."""
        return cls(500, "forerun made a mistake; its log has the details under this request's id", type="server_error")

    def encode(self) -> bytes:
        """The body as JSON."""
        return msgspec.json.encode(ErrorEnvelope(self.body))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence that names the known word nearest to `name`, or all of them when none is near."""
    names = sorted(known)
    near = get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}"
