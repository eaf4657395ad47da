"""Pages of other origins that may use the service: Cross-Origin Resource Sharing, as the Fetch standard has it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from aiohttp import web
from aiohttp.typedefs import Handler

ANY = "*"
"""Allows pages of every origin."""
MAX_AGE_SECONDS = 600
"""How long a browser may keep the answer to a preflight request."""
EXPOSED = "X-Request-Id, X-Forerun-Ignored, X-Forerun-Experiment, X-Forerun-Arm, Retry-After"
"""Response headers that a page may read."""
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/,*]+", re.IGNORECASE)


class AllowedOrigins:
    """Origins whose pages may send requests and read the answers."""

    def __init__(self, origins: Sequence[str]) -> None:
        """Raises ValueError for what is no origin."""
        for origin in origins:
            if origin != ANY and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"allowed_origins has {origin!r}; each must be an origin such as https://app.example, or {ANY!r}"
                )
        self._origins = frozenset(map(_normalized, origins))

    @property
    def is_empty(self) -> bool:
        """Whether no other origin is allowed."""
        return not self._origins

    def allows(self, origin: str) -> bool:
        """Whether pages of this origin may use the service."""
        return ANY in self._origins or _normalized(origin) in self._origins


def _normalized(origin: str) -> str:
    """An origin as browsers write it: in lower case, without the scheme's default port."""
    origin = origin.lower()
    if origin.startswith("https://"):
        return origin.removesuffix(":443")
    return origin.removesuffix(":80") if origin.startswith("http://") else origin


ORIGINS = web.AppKey("origins", AllowedOrigins)


@web.middleware
async def preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer a browser that asks whether a page of another origin may send a request: 204 where it may."""
    origin, method = request.headers.get("Origin"), request.headers.get("Access-Control-Request-Method")
    if request.method == "OPTIONS" and origin and method and request.app[ORIGINS].allows(origin):
        headers = {"Access-Control-Allow-Methods": method, "Access-Control-Max-Age": str(MAX_AGE_SECONDS)}
        if wanted := request.headers.get("Access-Control-Request-Headers"):
            headers["Access-Control-Allow-Headers"] = wanted
        return web.Response(status=204, headers=headers)
    return await handler(request)


async def add_origin_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler: let a page of an allowed origin read the response."""
    allowed = request.app[ORIGINS]
    if allowed.is_empty:
        return
    response.headers.add("Vary", "Origin")
    origin = request.headers.get("Origin")
    if origin is not None and allowed.allows(origin):
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Expose-Headers"] = EXPOSED
