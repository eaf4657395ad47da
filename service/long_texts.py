"""Work on long texts, apart from everything else: one thread, the shortest text first."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from service.errors import ApiError
from service.memory import MemoryKeeper

LONG_TEXT_BYTES = 16 * 1024
"""Characters from which a text is tokenized here; a shorter one takes a few milliseconds in any thread."""

Result = TypeVar("Result")


class LongTexts:
    """A line in front of one thread. Texts that together exceed `max_bytes` are not taken in."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.pending = 0
        """Characters that wait or are worked on."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="long-texts")
        self._memory = MemoryKeeper()
        self._line: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._is_taken = False

    async def run(self, size: int, work: Callable[[], Result]) -> Result:
        """What `work` returns for a text of `size` characters. Raises `ApiError` (429) if the line is full."""
        if self.pending and self.pending + size > self.max_bytes:
            raise ApiError.overloaded(
                f"{self.pending} characters of long texts wait to be tokenized, of at most {self.max_bytes}; "
                "try again later"
            )
        self.pending += size
        try:
            await self._take_turn(size)
            try:
                return await asyncio.get_running_loop().run_in_executor(self._thread, work)
            finally:
                self._pass_turn()
        finally:
            self.pending -= size
            self._memory.note(size, is_idle=not self.pending)

    def close(self) -> None:
        """Take no more work; what is being done ends by itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._memory.close()

    async def _take_turn(self, size: int) -> None:
        if not self._is_taken:
            self._is_taken = True
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._line, (size, next(self._numbers), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_turn()
            raise

    def _pass_turn(self) -> None:
        while self._line:
            turn = heapq.heappop(self._line)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self._is_taken = False
