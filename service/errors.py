"""What a client is told when something is wrong: OpenAI's error shape, on every protocol."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

import msgspec

MAX_VALUE_LENGTH = 80
"""Most characters of a client's value that an error or a log line repeats."""
MAX_MESSAGE_BYTES = 1500
"""Most bytes of an error's message as JSON: a net below `shorten`, so that no message grows with what a client sent."""
MAX_PARAM_BYTES = 200
"""Most bytes of the field name in an error as JSON."""
MAX_KNOWN_LENGTH = 600
"""Most characters of a list of known names in an error."""


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
        message = _fitted(message, MAX_MESSAGE_BYTES)
        param = None if param is None else _fitted(param, MAX_PARAM_BYTES)
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
        """500: an internal error; the log has its traceback under the request's id."""
        return cls(500, "internal error; the log has the details under this request's id", type="server_error")

    @classmethod
    def of(cls, error: Exception) -> ApiError:
        """The error a client gets for any exception: itself, 503 where memory has run out, else an internal error."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, MemoryError):
            return cls.unavailable("no memory is left for this request; try again shortly", "out_of_memory")
        return cls.internal()

    def encode(self) -> bytes:
        """The body as JSON."""
        return msgspec.json.encode(ErrorEnvelope(self.body))


def shorten(value: object) -> str:
    """A client's value as errors and log lines repeat it: printable, one line, at most `MAX_VALUE_LENGTH`."""
    if isinstance(value, str | bytes):
        value = value[: MAX_VALUE_LENGTH + 1]
    return cut(repr(value))


def cut(text: str, most: int = MAX_VALUE_LENGTH) -> str:
    """The first `most` characters of a text; an ellipsis is the last of them where something was left out."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence that names the known word nearest to `name`, or the known words when none is near."""
    names = sorted(known)
    near = get_close_matches(cut(name), names, n=1, cutoff=0.6)
    return f"did you mean {cut(near[0])!r}?" if near else f"known are {_listed(names)}"


def _listed(names: list[str]) -> str:
    """Names with commas between them, as many as fit in `MAX_KNOWN_LENGTH`, and how many more there are."""
    listed: list[str] = []
    length = 0
    for name in names:
        length += len(cut(name)) + 2
        if length > MAX_KNOWN_LENGTH:
            return f"{', '.join(listed)} and {len(names) - len(listed)} more"
        listed.append(cut(name))
    return ", ".join(listed)


def _fitted(text: str, most: int) -> str:
    """A text that takes at most `most` bytes as JSON, cut where it takes more; half characters are spelled out."""
    text = text[: most + 1].encode("utf-8", "backslashreplace").decode()
    length = len(text)
    while len(msgspec.json.encode(kept := cut(text, length))) > most:
        length = length * 3 // 4
    return kept
