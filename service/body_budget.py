"""Room for the bodies of requests, over all connections."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

SMALL_BODY_BYTES = 64 * 1024
"""Largest body that never waits: the limit of connections bounds what all of these hold. A larger one is parsed in
another process."""
GRACE_SECONDS = 5.0
"""A body that has been arriving for longer is given up when another one waits for its room."""
RETRY_SECONDS = 0.5


class Hold:
    """The room that one body takes of the budget."""

    def __init__(self, num_bytes: int, began_at: float, turn: asyncio.Lock | None) -> None:
        """`turn` is the lock that large bodies share; None for a small one, which needs no turns."""
        self._turn = turn
        self.num_bytes = num_bytes
        self.began_at = began_at
        self.is_given_up = False
        self.deadline: asyncio.Timeout | None = None
        """The deadline of reading, while the body is being read."""

    async def take_turn(self) -> None:
        """Wait before reading on: each pass of the event loop reads from one large body only."""
        if self._turn is not None:
            async with self._turn:
                await asyncio.sleep(0)


class BodyBudget:
    """Bytes of large bodies that may be held at a time. First come, first served."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held = 0
        self._holds: OrderedDict[Hold, None] = OrderedDict()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def hold(self, num_bytes: int) -> AsyncIterator[Hold]:
        """Room for a body, as soon as there is some. One body alone always gets it."""
        loop = asyncio.get_running_loop()
        while (self._waiting and self._waiting[0].done()) or not self._has_room(num_bytes):
            turn: asyncio.Future[None] = loop.create_future()
            self._waiting.append(turn)
            try:
                await asyncio.wait([turn], timeout=RETRY_SECONDS)
            finally:
                self._waiting.remove(turn)
            self._give_up_oldest(loop.time())
        hold = Hold(num_bytes, loop.time(), self._turn)
        self._holds[hold] = None
        self.held += num_bytes
        try:
            yield hold
        finally:
            del self._holds[hold]
            self.held -= num_bytes
            for turn in self._waiting:
                if not turn.done():
                    turn.set_result(None)
                    break

    def _has_room(self, num_bytes: int) -> bool:
        return not self._holds or self.held + num_bytes <= self.max_bytes

    def _give_up_oldest(self, now: float) -> None:
        """End the body that has been arriving for longest, if that is too long while others wait."""
        for hold in self._holds:
            if now - hold.began_at < GRACE_SECONDS:
                return
            if hold.deadline is not None and not hold.is_given_up:
                hold.is_given_up = True
                hold.deadline.reschedule(now)
                return
