"""The time of day for experiments, in which setting the machine's clock ends nothing and starts nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

TOLERANCE_SECONDS = 1.0
"""A difference of the machine's clock from this one that is followed at once, as NTP's small corrections are."""
MAX_RATE = 0.1
"""How much faster or slower than true this clock goes to catch up with a larger one: six minutes an hour."""


class SteadyClock:
    """Seconds since the epoch. Called again it never says less.

    It starts with the machine's clock and then keeps its own time; where the machine's clock is set by more than a
    second, it goes a little faster or slower until both agree. A cool-down of an hour so takes about an hour,
    and slots of a switchback last what they should, whatever is done to the machine's clock.
    """

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._asked_at = monotonic()
        self._now = wall()

    def __call__(self) -> float:
        """The time now."""
        asked_at = self._monotonic()
        passed = asked_at - self._asked_at
        self._asked_at = asked_at
        error = self._wall() - (self._now + passed)
        if abs(error) > TOLERANCE_SECONDS:
            error = max(-MAX_RATE * passed, min(MAX_RATE * passed, error))
        self._now += max(passed + error, 0.0)
        return self._now
