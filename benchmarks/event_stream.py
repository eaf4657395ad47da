"""Server-sent events with the time each arrived, read with as little work as possible while the answer comes."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import aiohttp

TIMEOUT = aiohttp.ClientTimeout(total=1800.0)


class RequestFailedError(RuntimeError):
    """A server refused a request or broke off its answer."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"status {status}: {text[:500]}")
        self.status = status


class Event(NamedTuple):
    """The data of one event, undecoded."""

    at: float
    """Seconds, by `time.perf_counter`, at which the last byte of its line arrived."""
    data: bytes


async def post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> list[Event]:
    """The events that answer a request, without the closing `[DONE]`. Raises `RequestFailedError`."""
    events: list[Event] = []
    rest = b""
    async with session.post(url, json=body, timeout=TIMEOUT) as response:
        if response.status != 200:
            raise RequestFailedError(response.status, await response.text())
        async for chunk in response.content.iter_any():
            now = time.perf_counter()
            *lines, rest = (rest + chunk).split(b"\n")
            events += [Event(now, line[6:].strip()) for line in lines if line.startswith(b"data: ")]
    return [event for event in events if event.data != b"[DONE]"]
