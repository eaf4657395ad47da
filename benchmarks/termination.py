"""A measurement that is terminated stops what it has started first."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

EXIT_STATUS = 128 + signal.SIGTERM
"""As a shell has it of a process that SIGTERM ended."""


def run(measurement: Coroutine[Any, Any, T]) -> T:
    """What `measurement` returns, as `asyncio.run` does; SIGTERM cancels it, and then raises SystemExit."""
    is_terminated = False

    async def until_terminated() -> T:
        task = asyncio.current_task()
        assert task is not None

        def terminate() -> None:
            nonlocal is_terminated
            if not is_terminated:  # a second one would cancel the stopping
                is_terminated = True
                task.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
        return await measurement

    try:
        return asyncio.run(until_terminated())
    except asyncio.CancelledError:
        if not is_terminated:
            raise
        raise SystemExit(EXIT_STATUS) from None
