"""GET /v1/stream: many generations on one WebSocket."""

from __future__ import annotations

import asyncio
import time
import uuid

import msgspec
import structlog
from aiohttp import WSCloseCode, WSMsgType, web
from msgspec import UNSET, UnsetType

from service.answer import Answer, Closing
from service.body_budget import SMALL_BODY_BYTES
from service.choice import ChoiceDelta
from service.connections import connection_of
from service.context import FRONT, check_origin
from service.errors import ApiError, ErrorBody, shorten
from service.event_stream import drop, limit_writes
from service.front import Front
from service.large_request_messages import Parsed, Tokenized
from service.large_requests import parsed
from service.origin import Origin
from service.request_metrics import Metrics
from service.responses import Usage
from service.schema import Received
from service.socket_messages import Cancel, Incoming, parse_generate
from service.token_logprobs import LOWEST, spelled
from service.tokenizer import Tokenizer
from service.validation import parse_body
from speculation.messages import SpeculationConfig, TokenLogprob

PING_SECONDS = 30.0
PROTOCOL = "forerun"
"""What clients that must offer a subprotocol offer."""
SOCKETS = web.AppKey[set[web.WebSocketResponse]]("sockets")
_log = structlog.get_logger("forerun.websocket")


class Started(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="started"):
    """Out: the request is understood and queued."""

    id: str
    model: str
    seed: int
    prompt_tokens: int
    experiment: str | UnsetType = UNSET
    """The experiment that the request takes part in, and its arm there."""
    arm: str | UnsetType = UNSET
    ignored_fields: tuple[str, ...] | UnsetType = UNSET
    """Paths of the request's fields that were left out."""
    speculation: SpeculationConfig
    """The config that the request runs with."""


class Alternative(msgspec.Struct, frozen=True, array_like=True):
    """A token that could have stood in the place of another."""

    id: int
    text: str
    logprob: float


class Token(msgspec.Struct, frozen=True):
    """One token of a `tokens` message."""

    id: int
    logprob: float | None
    source: str
    offset: int
    """Where it begins in the choice's text, in characters (Unicode code points)."""
    alternatives: list[Alternative] | UnsetType = UNSET
    """The likeliest in its place, where the request asks for `top_logprobs` or `logprobs` above 0."""


class Tokens(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tokens"):
    """Out: what is new of one choice."""

    id: str
    index: int
    text: str
    tokens: list[Token]


class FinishedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """How one choice ended."""

    index: int
    finish_reason: str
    stop_reason: str | int | None


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="finished"):
    """Out: every choice has ended. The last message of its id."""

    id: str
    choices: list[FinishedChoice]
    usage: Usage
    metrics: Metrics
    seed: int


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="error"):
    """Out: the generation is over, or (without id) a message was not understood."""

    id: str | None
    error: ErrorBody
    rejected_id: str | UnsetType = UNSET
    """Of a message that was refused although a generation of that id goes on: `id` is null then."""


Outgoing = Started | Tokens | Finished | Failed


async def stream(request: web.Request) -> web.WebSocketResponse:
    """Serve one socket until its client closes it or leaves; then everything it asked for ends."""
    front = request.app[FRONT]
    check_origin(request)
    socket = web.WebSocketResponse(
        heartbeat=PING_SECONDS,
        max_msg_size=front.max_body_bytes,
        compress=False,
        protocols=(PROTOCOL,),
    )
    await socket.prepare(request)
    limit_writes(request)
    sockets = request.app[SOCKETS]
    sockets.add(socket)
    try:
        await Conversation(request, socket, front).run()
    except Exception:  # noqa: BLE001 - the last resort: nothing but frames may follow on this connection
        _log.exception("socket failed")
        await socket.close(code=WSCloseCode.INTERNAL_ERROR, message=b"internal error")
    finally:
        sockets.discard(socket)
    return socket


async def close_sockets(app: web.Application) -> None:
    """Signal handler: tell every client that the service goes away."""
    for socket in app[SOCKETS].copy():
        await socket.close(code=WSCloseCode.GOING_AWAY, message=b"the service is shutting down")


class Conversation:
    """What goes on over one socket: a task for each generation, all ended when the socket is."""

    def __init__(self, request: web.Request, socket: web.WebSocketResponse, front: Front) -> None:
        self._request = request
        self._socket = socket
        self._front = front
        self._running: dict[str, Running] = {}
        self._connection = connection_of(request)
        self._encode = msgspec.json.Encoder().encode

    async def run(self) -> None:
        """Read messages until the client is gone."""
        self._note_state()
        if self._connection is not None:
            self._connection.note_message()
        async with asyncio.TaskGroup() as tasks:
            try:
                async for message in self._socket:
                    if self._connection is not None:
                        self._connection.note_message()
                    if message.type in {WSMsgType.TEXT, WSMsgType.BINARY}:
                        data = message.data.encode() if message.type is WSMsgType.TEXT else message.data
                        await self._handle(data, tasks)
            finally:
                for running in self._running.values():
                    running.task.cancel()

    def _note_state(self) -> None:
        """Say whether the connection could be closed to make room for another."""
        if self._connection is None:
            return
        if self._running:
            self._connection.set_busy()
        else:
            self._connection.set_quiet()

    async def _handle(self, data: bytes, tasks: asyncio.TaskGroup) -> None:
        message_id: str | None = None
        try:
            if len(data) > SMALL_BODY_BYTES:
                async with self._front.bodies.hold(len(data)):
                    answer = await self._front.parse_large("socket", [data])
                message_id = None if isinstance(answer, Tokenized) else answer.message_id
                request = parsed(answer)
                self._start(request.message_id, request, tasks)
                return
            incoming = parse_body(data, Incoming)
            message_id = incoming.id
            match incoming.type:
                case "generate":
                    self._start(*parse_generate(data, self._front.settings.server.unknown_fields), tasks)
                case "cancel":
                    if (running := self._running.get(parse_body(data, Cancel).id)) is not None:
                        running.cancel()
                case _:
                    shown = shorten(incoming.type)
                    raise ApiError.invalid("type", f"type is {shown}; it must be 'generate' or 'cancel'")
        except ApiError as error:
            await self._send(self._refusal(message_id, error))
        except Exception as error:  # noqa: BLE001 - other generations of the socket go on
            _log.exception("message failed")
            await self._send(self._refusal(message_id, ApiError.of(error)))

    def _refusal(self, message_id: str | None, error: ApiError) -> Failed:
        """The answer to a message that was not served, which cannot be taken for the end of another's generation."""
        if message_id in self._running:
            return Failed(id=None, error=error.body, rejected_id=message_id)
        return Failed(id=message_id, error=error.body)

    def _start(self, message_id: str, body: Received | Parsed, tasks: asyncio.TaskGroup) -> None:
        if message_id in self._running:
            raise ApiError.invalid("id", f"id {message_id!r} is in use on this socket; choose another")
        most = self._front.settings.limits.max_socket_requests
        if len(self._running) >= most:
            raise ApiError.overloaded(f"{most} generations run on this socket; wait for one to end, or cancel it")
        self._running[message_id] = Running(tasks.create_task(self._serve(message_id, body)))
        self._note_state()

    async def _serve(self, message_id: str, body: Received | Parsed) -> None:
        """One generation, from `started` to `finished` or `error`. With the last message its id is free again."""
        try:
            last = await self._outcome(message_id, body)
        finally:
            del self._running[message_id]
            self._note_state()
        await self._send(last)

    async def _outcome(self, message_id: str, body: Received | Parsed) -> Finished | Failed:
        """Send everything of a generation but its last message, which is returned."""
        origin = Origin(route=self._request.path, headers=self._request.headers, arrived_at=time.perf_counter())
        generation_id = f"ws-{uuid.uuid4().hex}"
        try:
            async with self._front.generate(generation_id, body, origin) as answer:
                return await self._answer(message_id, answer)
        except ApiError as error:
            _log.info("generation failed", generation=generation_id, status=error.status, reason=str(error))
            return Failed(id=message_id, error=error.body)
        except Exception as error:  # noqa: BLE001 - other generations of the socket go on
            _log.exception("generation failed", generation=generation_id)
            return Failed(id=message_id, error=ApiError.of(error).body)

    async def _answer(self, message_id: str, answer: Answer) -> Finished:
        generation, assignment = answer.generation, answer.assignment
        await self._send(
            Started(
                id=message_id,
                model=self._front.model.name,
                seed=generation.sampling.seed,
                prompt_tokens=sum(len(prompt.token_ids) for prompt in generation.prompts),
                experiment=UNSET if assignment is None else assignment.experiment,
                arm=UNSET if assignment is None else assignment.arm,
                ignored_fields=generation.ignored_fields or UNSET,
                speculation=generation.speculation or self._front.settings.engine.speculation,
            )
        )
        self._running[message_id].begin(answer)
        finished: list[FinishedChoice] = []
        async for deltas in answer.deltas():
            for delta in deltas:
                if delta.text or delta.token_ids:
                    await self._send(_tokens(message_id, delta, self._front.model.tokenizer))
                if delta.finish_reason is not None:
                    finished.append(
                        FinishedChoice(
                            index=delta.index, finish_reason=delta.finish_reason, stop_reason=delta.stop_reason
                        )
                    )
        return _finished(message_id, finished, answer.closing)

    async def _send(self, message: Outgoing) -> None:
        """Send one message. A client that does not read is dropped; then, as when it left, the reading ends."""
        try:
            async with asyncio.timeout(self._front.settings.server.stall_seconds):
                await self._socket.send_frame(self._encode(message), WSMsgType.TEXT)
        except TimeoutError:
            self._front.metrics.stalls.inc()
            drop(self._request)
        except ConnectionError:
            pass


class Running:
    """A generation under way, which can be cancelled before and after it has begun to answer."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self.task = task
        self._answer: Answer | None = None
        self._is_cancelled = False

    def begin(self, answer: Answer) -> None:
        self._answer = answer
        if self._is_cancelled:
            answer.abort()

    def cancel(self) -> None:
        """End it: what was generated is kept, and it finishes with the reason "abort"."""
        self._is_cancelled = True
        if self._answer is not None:
            self._answer.abort()


def _alternatives(row: TokenLogprob | None, tokenizer: Tokenizer) -> list[Alternative] | UnsetType:
    if row is None or not row.top_token_ids:
        return UNSET
    pairs = zip(row.top_token_ids, row.top_logprobs, strict=True)
    return [Alternative(each, spelled(tokenizer.spelling(each)), max(logprob, LOWEST)) for each, logprob in pairs]


def _tokens(message_id: str, delta: ChoiceDelta, tokenizer: Tokenizer) -> Tokens:
    rows = delta.logprobs or [None] * len(delta.token_ids)
    tokens = [
        Token(token_id, None if row is None else row.logprob, source, offset, _alternatives(row, tokenizer))
        for token_id, row, source, offset in zip(delta.token_ids, rows, delta.sources, delta.offsets, strict=True)
    ]
    return Tokens(id=message_id, index=delta.index, text=delta.text, tokens=tokens)


def _finished(message_id: str, choices: list[FinishedChoice], closing: Closing) -> Finished:
    return Finished(id=message_id, choices=choices, usage=Usage.of(closing), metrics=closing.metrics, seed=closing.seed)
