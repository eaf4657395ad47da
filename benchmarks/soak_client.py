"""Requests whose right answers are known, over every protocol, and what a client counts of them."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import aiohttp
import msgspec

from benchmarks.questions import Question

TEXT, CHAT, SOCKET = "/v1/completions", "/v1/chat/completions", "/v1/stream"
ANSWER_SECONDS = 120.0
"""Longest wait for a whole answer, in which an engine may be killed and another take over."""

WRONG: tuple[tuple[str, dict[str, Any]], ...] = (
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [{"role": "user", "content": "hi"}], "temperature": 3}),
    (CHAT, {"messages": [{"role": "user", "content": "hi"}], "top_k": 2**64}),
    (CHAT, {"messages": [{"role": "user", "content": "hi"}], "speculation": {"method": "magic"}}),
    (TEXT, {"prompt": ""}),
    (TEXT, {"prompt": "hi", "logit_bias": {"9" * 5_000: 1}}),
    (TEXT, {"prompt": [-1], "max_tokens": 1}),
    (TEXT, {"prompt": "hi", "max_tokens": 10**9}),
)
"""Requests that are answered with a 4xx status."""


class WrongAnswerError(Exception):
    """An answer that must not be; the message says of which request, and how it differs."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A request without its speculation config, and the tokens it must get."""

    route: str
    body: dict[str, Any]
    token_ids: list[int] = []


def make_cases(questions: Sequence[Question], count: int, seed: int) -> list[Case]:
    """Requests of both routes, greedy and sampled, with seeds; their tokens are not yet known."""
    rng = random.Random(seed)
    cases = []
    for number in range(count):
        text = questions[number % len(questions)].turns[0]
        body: dict[str, Any] = {
            "max_tokens": rng.choice((8, 24, 48, 96)),
            "temperature": rng.choice((0, 0, 0.7, 1.0)),
            "top_p": rng.choice((1.0, 0.9)),
            "seed": number,
            "return_token_ids": True,
            "cache_salt": str(number % 3),
        }
        if number % 2:
            cases.append(Case(route=TEXT, body={**body, "prompt": text}))
        else:
            cases.append(Case(route=CHAT, body={**body, "messages": [{"role": "user", "content": text}]}))
    return cases


def sending_trace() -> aiohttp.TraceConfig:
    """Hooks for the session of a `SoakClient`, by which it knows whether a request was sent before it was left."""

    async def note(_session: aiohttp.ClientSession, context: Any, _params: object) -> None:
        if isinstance(context.trace_request_ctx, asyncio.Event):
            context.trace_request_ctx.set()

    trace = aiohttp.TraceConfig()
    trace.on_request_chunk_sent.append(note)
    return trace


class SoakClient:
    """Asks a service by REST, SSE and WebSocket, leaves now and then, and counts what it did."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        """`session` was made with `sending_trace`."""
        self._session = session
        self._url = url
        self.answers: Counter[tuple[str, int]] = Counter()
        """Answers read to their end, by route and status."""
        self.num_completion_tokens = 0
        """Tokens of answers read to their end, the generations of sockets included."""
        self.num_left: Counter[str] = Counter()
        """Requests that were sent and left before their end, by route."""
        self.num_left_tokens = 0
        """Most tokens that those could have got."""

    async def ask(self, case: Case, speculation: Any) -> list[int]:
        """The tokens of a whole answer in one piece. Raises `WrongAnswerError` for an error."""
        async with self._session.post(self._url + case.route, json=_body(case, speculation)) as response:
            answer = await response.json()
        self.answers[case.route, response.status] += 1
        if response.status != 200:
            raise WrongAnswerError(f"status {response.status}: {answer}")
        self.num_completion_tokens += answer["usage"]["completion_tokens"]
        token_ids: list[int] = answer["choices"][0]["token_ids"]
        return token_ids

    async def ask_streamed(self, case: Case, speculation: Any, *, leave_after: float | None = None) -> list[int]:
        """The tokens of a streamed answer; none where the client left after `leave_after` seconds."""
        body = {**_body(case, speculation), "stream": True, "stream_options": {"include_usage": True}}
        tokens: list[int] = []
        sent = asyncio.Event()
        try:
            async with (
                asyncio.timeout(leave_after),
                self._session.post(self._url + case.route, json=body, trace_request_ctx=sent) as response,
            ):
                if response.status != 200:
                    self.answers[case.route, response.status] += 1
                    raise WrongAnswerError(f"status {response.status}: {await response.text()}")
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        event = json.loads(line[6:])
                        if "error" in event:
                            raise WrongAnswerError(f"the stream ended with {event}")
                        tokens += [token for choice in event["choices"] for token in choice["token_ids"]]
        except TimeoutError:
            if sent.is_set():
                self._leave(case)
            return []
        self.answers[case.route, 200] += 1
        self.num_completion_tokens += len(tokens)
        return tokens

    async def ask_on_socket(self, case: Case, speculation: Any, *, cancel_after: float | None = None) -> list[int]:
        """The tokens of a generation on a new WebSocket; none where it was cancelled after `cancel_after` seconds."""
        body = {name: value for name, value in _body(case, speculation).items() if name != "return_token_ids"}
        tokens: list[int] = []
        async with self._session.ws_connect(self._url + SOCKET) as socket:
            self.answers[SOCKET, 101] += 1
            await socket.send_json({"type": "generate", "id": "only", "request": body})
            cancelling = asyncio.create_task(_cancel_later(socket, cancel_after)) if cancel_after is not None else None
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    while True:
                        message = json.loads(await socket.receive_str())
                        if message["type"] == "tokens":
                            tokens += [token["id"] for token in message["tokens"]]
                        elif message["type"] == "error":
                            raise WrongAnswerError(f"the generation ended with {message['error']}")
                        elif message["type"] == "finished":
                            break
            finally:
                if cancelling is not None:
                    cancelling.cancel()
                    with suppress(asyncio.CancelledError, ConnectionError):
                        await cancelling
        self.num_completion_tokens += message["usage"]["completion_tokens"]
        return [] if message["choices"][0]["finish_reason"] == "abort" else tokens

    async def ask_wrongly(self, route: str, body: dict[str, Any]) -> None:
        """A request that must be refused. Raises `WrongAnswerError` if it is not, or for a mistake of the service."""
        async with self._session.post(self._url + route, json=body) as response:
            answer = await response.text()
        self.answers[route, response.status] += 1
        if not 400 <= response.status < 500:
            raise WrongAnswerError(f"a wrong request got status {response.status}: {answer[:300]}")

    def _leave(self, case: Case) -> None:
        self.num_left[case.route] += 1
        self.num_left_tokens += int(case.body["max_tokens"])


async def _cancel_later(socket: aiohttp.ClientWebSocketResponse, seconds: float) -> None:
    await asyncio.sleep(seconds)
    await socket.send_json({"type": "cancel", "id": "only"})


def _body(case: Case, speculation: Any) -> dict[str, Any]:
    body = {**case.body, "speculation": speculation}
    if isinstance(speculation, dict) and speculation.get("method") == "prediction":
        body["prediction"] = {"type": "content", "content": "The answer is: 1, 2, 3. I'd be happy to help."}
    return body
