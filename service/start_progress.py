"""A line on the terminal that says what the engine does while it loads, and for how long."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import TextIO

from service.supervisor import Supervisor

REDRAW_SECONDS = 1.0
CLEAR_LINE = "\r\x1b[2K"
"""Carriage return, and the control sequence that erases the line."""


class StartProgress:
    """The line, redrawn each second; log lines of this process erase it first, so that none is torn."""

    def __init__(self, terminal: TextIO) -> None:
        self._terminal = terminal
        self._phase: str | None = None
        self._began_at = 0.0

    def note(self, phase: str) -> None:
        """The engine has begun something else."""
        self._phase, self._began_at = phase, time.monotonic()
        self._draw()

    def clear(self) -> None:
        """Erase the line."""
        self._terminal.write(CLEAR_LINE)
        self._terminal.flush()

    def filter(self, _: logging.LogRecord) -> bool:
        """Make room for a log record: a filter of a handler, which lets every record pass."""
        if self._phase is not None:
            self.clear()
        return True

    async def run(self) -> None:
        """Keep the seconds going."""
        while True:
            await asyncio.sleep(REDRAW_SECONDS)
            self._draw()

    def _draw(self) -> None:
        if self._phase is not None:
            seconds = time.monotonic() - self._began_at
            self._terminal.write(f"{CLEAR_LINE}engine: {self._phase} … {seconds:.0f} s")
            self._terminal.flush()

    def stop(self) -> None:
        """The engine serves, or never will."""
        if self._phase is not None:
            self.clear()
        self._phase = None


@asynccontextmanager
async def shown_progress(supervisors: Iterable[Supervisor], terminal: TextIO) -> AsyncIterator[StartProgress]:
    """Show what the engines say of their start, until `stop` or the end."""
    progress = StartProgress(terminal)
    handlers = logging.getLogger().handlers
    for supervisor in supervisors:
        supervisor.on_loading = progress.note
    for handler in handlers:
        handler.addFilter(progress)
    task = asyncio.create_task(progress.run(), name="start progress")
    try:
        yield progress
    finally:
        progress.stop()
        for handler in handlers:
            handler.removeFilter(progress)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
