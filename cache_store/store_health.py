"""Whether the metadata store answers, as everybody who talks to it has found."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog
from structlog.typing import FilteringBoundLogger


class StoreHealth:
    """Shared by all that use one store, so that an outage is found once, logged once, and waited for by nobody.

    While the store is down only background work asks it, and that less and less often (`may_try`); who serves a request
    goes on without (`is_up`).
    """

    def __init__(
        self,
        *,
        first_retry_seconds: float = 0.5,
        longest_retry_seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        log: FilteringBoundLogger | None = None,
    ) -> None:
        self._first_retry = first_retry_seconds
        self._longest_retry = longest_retry_seconds
        self._clock = clock
        self._log = log or structlog.get_logger("forerun.metadata_store")
        self._down_since: float | None = None
        self._retry_after = first_retry_seconds
        self._next_try = 0.0
        self.num_failures = 0
        """Calls without an answer since start."""

    @property
    def is_up(self) -> bool:
        """Whether the last call was answered. True before the first."""
        return self._down_since is None

    @property
    def may_try(self) -> bool:
        """Whether background work should ask the store now."""
        return self.is_up or self._clock() >= self._next_try

    def succeeded(self) -> None:
        """A call was answered."""
        if self._down_since is not None:
            self._log.info("metadata store is back", down_seconds=round(self._clock() - self._down_since, 3))
        self._down_since = None
        self._retry_after = self._first_retry

    def failed(self, error: Exception) -> None:
        """A call was not answered."""
        now = self._clock()
        self.num_failures += 1
        if self._down_since is None:
            self._down_since = now
            self._log.warning("metadata store is unavailable; serving without it", reason=str(error))
        self._next_try = now + self._retry_after
        self._retry_after = min(2 * self._retry_after, self._longest_retry)
