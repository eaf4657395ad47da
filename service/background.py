"""Work beside requests: a loop that one bad item does not end, and a task whose unexpected end is logged."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import structlog

_log = structlog.get_logger("forerun.background")


MIN_RETRY_SECONDS = 0.1
"""Shortest pause after a step that failed, so that one that fails at once does not take the processor."""


async def run_forever(name: str, step: Callable[[], Awaitable[object]], pause_seconds: float) -> None:
    """Await `step` again and again, `pause_seconds` apart, until cancelled.

    An exception is logged with `name` and a traceback, once for as long as every step fails with the same one; the next
    step that succeeds is logged, too.
    """
    failure = ""
    while True:
        try:
            await step()
        except Exception as error:  # noqa: BLE001 - whatever one step raises, the next one is due
            if repr(error) != failure:
                _log.exception("background task failed; it goes on", task=name)
            failure = repr(error)
            await asyncio.sleep(max(pause_seconds, MIN_RETRY_SECONDS))
        else:
            if failure:
                _log.info("background task works again", task=name)
            failure = ""
            await asyncio.sleep(pause_seconds)


def start_task(name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task that should only end by cancellation: any other end is logged as an error with `name`."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_report_end)
    return task


@contextmanager
def logged_failures(name: str) -> Iterator[None]:
    """Log an exception of the body with `name` and a traceback, and go on behind the body."""
    try:
        yield
    except Exception:  # noqa: BLE001 - what comes behind the body must happen
        _log.exception("background task failed; it goes on", task=name)


def _report_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        _log.error("background task has ended", task=task.get_name(), exc_info=task.exception())
