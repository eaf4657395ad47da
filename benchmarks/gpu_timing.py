"""Timing calls on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import msgspec
import torch


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One number."""

    model: str
    what: str
    value: float
    unit: str
    floor: float | None = None
    """The least a step can take, by its bytes and the measured bandwidth."""


def timed(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Seconds of a call at the median, after three that compile and capture."""

    def synchronise() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    seconds = []
    for _ in range(repeats + (3 if device.type == "cuda" else 0)):
        synchronise()
        started = time.perf_counter()
        call()
        synchronise()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[-repeats:])


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy within the device reads and writes."""
    source = torch.zeros((1 << 30 if device.type == "cuda" else 1 << 24) // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / timed(lambda: target.copy_(source), 5, device)
