"""Where a request came from: what is known of it beside its body."""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """The route and the headers of a request, and when it arrived."""

    route: str
    """The path, such as /v1/chat/completions."""
    headers: Mapping[str, str]
    """Found by any spelling of their names, as aiohttp's are, or by the lower-case one."""
    arrived_at: float
    """By `time.perf_counter`."""

    @property
    def age(self) -> float:
        """Seconds since the request arrived."""
        return time.perf_counter() - self.arrived_at
