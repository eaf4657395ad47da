"""Who may come in: nobody while the service shuts down, and no more than the engine can queue."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from service.errors import ApiError


class Admission:
    """Counts the requests that are being served, and closes the door."""

    def __init__(self) -> None:
        self.is_draining = False
        self._num_inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @contextmanager
    def enter(self) -> Iterator[None]:
        """A request, from its first byte to its last. Raises `ApiError` (503) when the service is shutting down."""
        if self.is_draining:
            raise ApiError.unavailable("the service is shutting down; ask another one", "shutting_down")
        self._num_inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._num_inside -= 1
            if not self._num_inside:
                self._empty.set()

    @staticmethod
    def check_room(num_live: int, num_wanted: int, capacity: int) -> None:
        """Raises `ApiError` (429) if `num_wanted` further sequences would be more than the engine runs and queues."""
        if num_wanted > capacity:
            raise ApiError.invalid("n", f"{num_wanted} choices are asked for; this service can hold {capacity}")
        if num_live + num_wanted > capacity:
            raise ApiError.overloaded(
                f"{num_live} sequences are running or waiting, of at most {capacity}; try again later"
            )

    async def drain(self, seconds: float) -> bool:
        """Let nobody in, and wait until everybody has left; whether they have, when the time is up."""
        self.is_draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True
