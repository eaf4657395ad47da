from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.event_stream import Event, RequestFailedError, post
from benchmarks.load import Client, Distribution, LoadReport, Outcome, outcome_of, replay, summary
from benchmarks.serve import PromptSource, table
from benchmarks.trace import TracedRequest


def event(at: float, text: str | None = None, tokens: int | None = None) -> Event:
    choices = [] if text is None else [{"index": 0, "text": text}]
    usage = None if tokens is None else {"completion_tokens": tokens}
    return Event(at, msgspec.json.encode({"choices": choices, "usage": usage}))


def test_times_count_from_when_a_request_was_due() -> None:
    """First token, end and gaps come from the arrivals of text; the number of tokens from the usage."""
    found = outcome_of([event(10.5, ""), event(11.0, "a"), event(13.0, "b c"), event(13.1, None, 5)], 7, due_at=10.0)
    assert (found.status, found.num_prompt_tokens, found.num_output_tokens) == ("ok", 7, 5)
    assert (found.ttft, found.end_to_end, found.gaps, found.tpot) == (1.0, 3.0, [2.0], 0.5)


def test_a_stream_that_broke_off_is_no_answer() -> None:
    """An error among the events makes a status, and so does a stream without text."""
    assert outcome_of([event(1.0, "a"), Event(2.0, b'{"error": {}}')], 1, 0.0).status == "broken off"
    assert outcome_of([], 1, 0.0).status == "no text"


def test_a_summary_is_of_what_was_answered() -> None:
    """Rates and latencies leave out what failed, which the statuses count."""
    answered = Outcome(
        status="ok", num_prompt_tokens=30, num_output_tokens=3, ttft=1.0, end_to_end=2.0, gaps=[0.4, 0.6]
    )
    found = summary([answered, Outcome(status="status 429", num_prompt_tokens=1000)], seconds=10.0)
    assert found.statuses == {"ok": 1, "status 429": 1}
    assert (found.requests_per_second, found.prompt_tokens_per_second, found.output_tokens_per_second) == (0.1, 3, 0.3)
    assert found.ttft_ms is not None
    assert found.itl_ms is not None
    assert found.ttft_ms.p99 == 1000.0
    assert found.itl_ms.max == pytest.approx(600.0)
    assert "1 ok, 1 status 429" in table(found)


def test_percentiles_are_in_milliseconds() -> None:
    """A known distribution has the percentiles that anyone would compute."""
    found = Distribution.of([i / 1000 for i in range(101)] + [None])
    assert found == Distribution(mean=50.0, p50=50.0, p90=90.0, p95=95.0, p99=99.0, max=100.0)
    assert Distribution.of([None]) is None


def test_prompts_have_the_length_that_is_asked_for() -> None:
    """Also beyond the end of the text, and the same seed gives the same ones."""
    first, again = PromptSource(range(10), 3), PromptSource(range(10), 3)
    lengths = [1, 10, 37]
    prompts = [first.take(length) for length in lengths]
    assert [len(prompt) for prompt in prompts] == lengths
    assert prompts == [again.take(length) for length in lengths]
    assert all((b - a) % 10 == 1 for a, b in zip(prompts[2], prompts[2][1:], strict=False))


class ScriptedServer:
    """Answers with as many words as are asked for; refuses prompts of one token, never finishes those of two."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if len(body["prompt"]) == 1:
            return web.json_response({"error": {"message": "full"}}, status=429)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if len(body["prompt"]) == 2:
            await asyncio.sleep(60)
        for _ in range(body["max_tokens"]):
            data = event(0.0, "word").data
            await response.write(b"data: " + data[:5])  # an event is not always one packet
            await response.write(data[5:] + b"\n\n")
        await response.write(b"data: " + event(0.0, None, body["max_tokens"]).data + b"\n\ndata: [DONE]\n\n")
        return response


@pytest.fixture
def script() -> ScriptedServer:
    return ScriptedServer()


@pytest.fixture
async def url(script: ScriptedServer) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/completions", script.completions)
    async with TestServer(app) as server:
        yield str(server.make_url("/")).rstrip("/")


async def replayed(url: str, *requests: TracedRequest, drain_seconds: float = 30.0) -> LoadReport:
    async with aiohttp.ClientSession() as session:
        client = Client(session, url, {"ignore_eos": True})
        return await replay(
            requests, client, lambda n: [7] * n, drain_seconds=drain_seconds, progress=lambda text: None
        )


async def test_a_replay_asks_for_the_lengths_of_the_trace(url: str, script: ScriptedServer) -> None:
    """Every request has its prompt's and its answer's length, and fields that all share."""
    found = await replayed(url, TracedRequest(0.0, 5, 3), TracedRequest(0.01, 6, 2))
    assert found.statuses == {"ok": 2}
    assert sorted((len(body["prompt"]), body["max_tokens"]) for body in script.bodies) == [(5, 3), (6, 2)]
    assert all(body["ignore_eos"] is True for body in script.bodies)
    assert found.output_tokens_per_second * found.seconds == pytest.approx(5)


async def test_a_replay_counts_what_was_refused_and_what_it_cut(url: str) -> None:
    """A refusal is a status of its own, and an answer that does not end is cut when time is up."""
    found = await replayed(
        url, TracedRequest(0.0, 1, 1), TracedRequest(0.0, 2, 1), TracedRequest(0.0, 3, 1), drain_seconds=1.0
    )
    assert found.statuses == {"status 429": 1, "cut": 1, "ok": 1}


async def test_nobody_listening_is_counted_too() -> None:
    """A server that is not there fails requests, not the replay."""
    found = await replayed("http://127.0.0.1:9", TracedRequest(0.0, 5, 3))
    assert found.statuses == {"ClientConnectorError": 1}


async def test_events_are_put_together_from_packets(url: str) -> None:
    """Events that arrive in pieces come out whole, in order, and without the closing mark."""
    async with aiohttp.ClientSession() as session:
        events = await post(session, f"{url}/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 3})
        with pytest.raises(RequestFailedError, match=r"status 429: .*full"):
            await post(session, f"{url}/v1/completions", {"prompt": [1], "max_tokens": 3})
    assert [msgspec.json.decode(each.data)["usage"] for each in events] == [None] * 3 + [{"completion_tokens": 3}]
    assert [each.at for each in events] == sorted(each.at for each in events)
