"""The threads that help with every step of one entry point."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy.typing as npt

from target.native.step import WAKE_ONLY
from target.native.threads import STOPPED


class Workers:
    """`num_threads - 1` threads that sleep between steps; they end with `close`, or when nobody holds this any more.

    `entry` is a compiled function of `arguments` and a thread's number, as `target.native.step.run`.
    """

    def __init__(
        self,
        entry: Callable[..., None],
        control: npt.NDArray[Any],
        arguments: tuple[Any, ...],
        num_threads: int,
    ) -> None:
        threads = [
            threading.Thread(target=entry, args=(*arguments, i), name=f"forerun-native-{i}", daemon=True)
            for i in range(1, num_threads)
        ]
        for thread in threads:
            thread.start()
        self._finalizer = weakref.finalize(self, _stop, entry, control, arguments, threads)

    @property
    def are_closed(self) -> bool:
        return not self._finalizer.alive

    def close(self) -> None:
        """End the threads."""
        self._finalizer()


def _stop(
    entry: Callable[..., None],
    control: npt.NDArray[Any],
    arguments: tuple[Any, ...],
    threads: list[threading.Thread],
) -> None:
    """Tell the workers to end and wait for them; `arguments` are what they read until then."""
    control[STOPPED // 4] = 1
    entry(*arguments, WAKE_ONLY)
    for thread in threads:
        thread.join()
