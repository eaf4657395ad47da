"""Requests at given moments, whatever became of those before; and what their clients saw."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import aiohttp
import msgspec
import numpy as np

from benchmarks.event_stream import Event, RequestFailedError, post
from benchmarks.trace import TracedRequest

PERCENTILES = (50, 90, 95, 99)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Times are in seconds from the moment it was due, so that a late client hides nothing."""

    status: str
    """"ok", "cut" for one still running when time was up, or what was wrong."""
    num_prompt_tokens: int
    num_output_tokens: int = 0
    ttft: float | None = None
    end_to_end: float | None = None
    gaps: list[float] = []
    """Between the arrivals of text."""

    @property
    def tpot(self) -> float | None:
        """Mean time of each token after the first."""
        if self.ttft is None or self.end_to_end is None or self.num_output_tokens < 2:
            return None
        return (self.end_to_end - self.ttft) / (self.num_output_tokens - 1)


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Of a time, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Iterable[float | None]) -> Distribution | None:
        """None of no values."""
        values = 1000.0 * np.array([value for value in seconds if value is not None])
        if not len(values):
            return None
        p50, p90, p95, p99 = np.percentile(values, PERCENTILES).tolist()
        return cls(mean=float(values.mean()), p50=p50, p90=p90, p95=p95, p99=p99, max=float(values.max()))


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """A replay as a whole. Latencies are of the requests that were answered."""

    requests: int
    statuses: dict[str, int]
    seconds: float
    """From the first arrival to the last answer."""
    requests_per_second: float
    prompt_tokens_per_second: float
    output_tokens_per_second: float
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    """Between two arrivals of one answer; several accepted tokens that come at once are one arrival."""
    e2e_ms: Distribution | None


def summary(outcomes: Sequence[Outcome], seconds: float) -> LoadReport:
    """What `seconds` of load came to."""
    answered = [outcome for outcome in outcomes if outcome.status == "ok"]
    return LoadReport(
        requests=len(outcomes),
        statuses=dict(Counter(outcome.status for outcome in outcomes)),
        seconds=seconds,
        requests_per_second=len(answered) / seconds,
        prompt_tokens_per_second=sum(outcome.num_prompt_tokens for outcome in answered) / seconds,
        output_tokens_per_second=sum(outcome.num_output_tokens for outcome in answered) / seconds,
        ttft_ms=Distribution.of(outcome.ttft for outcome in answered),
        tpot_ms=Distribution.of(outcome.tpot for outcome in answered),
        itl_ms=Distribution.of(gap for outcome in answered for gap in outcome.gaps),
        e2e_ms=Distribution.of(outcome.end_to_end for outcome in answered),
    )


class Client:
    """Sends text completions to one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str, fields: dict[str, Any]) -> None:
        """`url` ends before `/v1`; `fields` go into every request."""
        self._session = session
        self._url = f"{url}/v1/completions"
        self._fields = fields

    async def send(self, prompt: list[int], num_output_tokens: int, due_at: float) -> Outcome:
        """One request; `due_at` is when it should have been sent, by `time.perf_counter`."""
        body = {
            **self._fields,
            "prompt": prompt,
            "max_tokens": num_output_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            events = await post(self._session, self._url, body)
        except RequestFailedError as error:
            return Outcome(status=f"status {error.status}", num_prompt_tokens=len(prompt))
        except (aiohttp.ClientError, TimeoutError) as error:
            return Outcome(status=type(error).__name__, num_prompt_tokens=len(prompt))
        return outcome_of(events, len(prompt), due_at)


def outcome_of(events: Sequence[Event], num_prompt_tokens: int, due_at: float) -> Outcome:
    """What an answer's events say."""
    arrivals: list[float] = []
    num_output_tokens = 0
    for event in events:
        chunk = msgspec.json.decode(event.data)
        if "error" in chunk:
            return Outcome(status="broken off", num_prompt_tokens=num_prompt_tokens)
        if any(choice.get("text") for choice in chunk.get("choices", ())):
            arrivals.append(event.at - due_at)
        num_output_tokens = (chunk.get("usage") or {}).get("completion_tokens", num_output_tokens)
    if not arrivals:
        return Outcome(status="no text", num_prompt_tokens=num_prompt_tokens)
    return Outcome(
        status="ok",
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens or len(arrivals),
        ttft=arrivals[0],
        end_to_end=arrivals[-1],
        gaps=[after - before for before, after in pairwise(arrivals)],
    )


async def replay(
    requests: Sequence[TracedRequest],
    client: Client,
    prompt_of: Callable[[int], list[int]],
    *,
    drain_seconds: float,
    progress: Callable[[str], None],
) -> LoadReport:
    """Send every request when it is due, and wait at most `drain_seconds` for answers after the last.

    `prompt_of` makes a prompt of a number of tokens.
    """
    tasks: list[asyncio.Task[Outcome]] = []
    prompts = [prompt_of(request.num_prompt_tokens) for request in requests]
    start = time.perf_counter()
    try:
        for request, prompt in zip(requests, prompts, strict=True):
            due_at = start + request.at
            await asyncio.sleep(max(due_at - time.perf_counter(), 0.0))
            tasks.append(asyncio.create_task(client.send(prompt, request.num_output_tokens, due_at)))
            progress(f"{len(tasks)}/{len(requests)} sent, {sum(task.done() for task in tasks)} answered")
        await asyncio.wait(tasks, timeout=drain_seconds)
        seconds = time.perf_counter() - start
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    outcomes = [
        Outcome(status="cut", num_prompt_tokens=request.num_prompt_tokens) if task.cancelled() else task.result()
        for task, request in zip(tasks, requests, strict=True)
    ]
    return summary(outcomes, seconds)
