"""POST /v1/chat/completions and POST /v1/completions."""

from __future__ import annotations

import uuid

import structlog
from aiohttp import web

from service.answer import Answer
from service.bodies import received_body
from service.body_budget import SMALL_BODY_BYTES
from service.choice import ChoiceDelta
from service.context import ARRIVED_AT, FRONT
from service.errors import ApiError
from service.event_stream import ClientStalledError, EventStream
from service.formats import AnswerFormat, ChatFormat, CompletionFormat
from service.front import Front
from service.large_request_messages import Kind, Parsed, fields_of
from service.large_requests import parsed
from service.origin import Origin
from service.responses import Usage
from service.schema import ChatCompletionRequest, CompletionRequest, GenerationRequest, Received, StreamOptions
from service.validation import parse_generation

DONE = b"[DONE]"
_log = structlog.get_logger("forerun.generation")


async def chat_completions(request: web.Request) -> web.StreamResponse:
    body = await _parsed(request, ChatCompletionRequest)
    generation_id = f"chatcmpl-{uuid.uuid4().hex}"
    fields = fields_of(body)
    style = ChatFormat(
        f"chatcmpl-{fields.request_id}" if fields.request_id else generation_id,
        request.app[FRONT].model,
        with_token_ids=bool(fields.return_token_ids),
        with_usage=wants_usage(fields),
    )
    return await respond(request, generation_id, body, style)


async def completions(request: web.Request) -> web.StreamResponse:
    body = await _parsed(request, CompletionRequest)
    generation_id = f"cmpl-{uuid.uuid4().hex}"
    fields = fields_of(body)
    style = CompletionFormat(
        f"cmpl-{fields.request_id}" if fields.request_id else generation_id,
        request.app[FRONT].model,
        with_token_ids=bool(fields.return_token_ids),
        with_usage=wants_usage(fields),
    )
    return await respond(request, generation_id, body, style)


async def _parsed(
    request: web.Request, request_type: type[ChatCompletionRequest | CompletionRequest]
) -> Received | Parsed:
    """The body of a request; a large one is tokenized as well."""
    front = request.app[FRONT]
    async with received_body(request) as pieces:
        if sum(map(len, pieces)) > SMALL_BODY_BYTES:
            kind: Kind = "chat" if request_type is ChatCompletionRequest else "completion"
            return parsed(await front.parse_large(kind, pieces))
        return parse_generation(b"".join(pieces), request_type, front.settings.server.unknown_fields)


def wants_usage(body: GenerationRequest) -> bool:
    """Whether a stream ends with a chunk of its own for the usage."""
    options = body.stream_options
    if options is not None and (options.include_usage or options.continuous_usage_stats) and not body.stream:
        raise ApiError.invalid("stream_options", "stream_options is given without stream; set stream to true")
    return options is not None and options.include_usage


async def respond(
    request: web.Request, generation_id: str, body: Received | Parsed, style: AnswerFormat
) -> web.StreamResponse:
    """Answer a request, whole or as a stream. A client that leaves cancels this, and so ends the generation."""
    front = request.app[FRONT]
    origin = Origin(route=request.path, headers=request.headers, arrived_at=request[ARRIVED_AT])
    if not fields_of(body).stream:
        async with front.generate(generation_id, body, origin) as answer:
            whole = await _collect(answer)
            encoded = style.whole(whole, answer.closing)
            return web.Response(body=encoded, content_type="application/json", headers=answer.headers)
    events = EventStream(request, stall_seconds=front.settings.server.stall_seconds)
    try:
        await _respond_in_events(front, generation_id, body, origin, events, style)
    except ClientStalledError:
        front.metrics.stalls.inc()
        raise
    return events.response


async def _respond_in_events(
    front: Front,
    generation_id: str,
    body: Received | Parsed,
    origin: Origin,
    events: EventStream,
    style: AnswerFormat,
) -> None:
    """Answer as a stream. Once it has begun, whatever goes wrong is its last event."""
    try:
        async with front.generate(generation_id, body, origin) as answer:
            events.response.headers.update(answer.headers)
            fields = fields_of(body)
            options = fields.stream_options or StreamOptions()
            async with events.kept_alive(lambda: style.opening(answer.generation.num_choices)):
                await _stream(
                    answer,
                    events,
                    style,
                    with_usage=options.include_usage,
                    with_usage_so_far=options.continuous_usage_stats,
                )
    except ConnectionError:
        raise
    except Exception as error:
        if not events.has_begun:
            raise
        if isinstance(error, ApiError):
            _log.warning("stream broken off", reason=str(error))
        else:
            _log.exception("stream failed", generation=generation_id)
        await events.send([ApiError.of(error).encode()])
    await events.end()


async def _collect(answer: Answer) -> list[ChoiceDelta]:
    """The whole of every choice."""
    parts: dict[int, list[ChoiceDelta]] = {}
    async for deltas in answer.deltas():
        for delta in deltas:
            parts.setdefault(delta.index, []).append(delta)
    return [ChoiceDelta.join(parts[index]) for index in sorted(parts)]


async def _stream(
    answer: Answer, events: EventStream, style: AnswerFormat, *, with_usage: bool, with_usage_so_far: bool
) -> None:
    """The choices as they grow; with the last chunk comes the bill."""
    async for deltas in answer.deltas():
        is_last = answer.is_finished
        closing = answer.closing if is_last else None
        final = None if with_usage else closing
        usage = Usage.until_now(answer) if with_usage_so_far else None
        chunks = [style.chunk(delta, final if delta is deltas[-1] else None, usage) for delta in deltas]
        if closing is not None:
            chunks += [style.usage_chunk(closing), DONE] if with_usage else [DONE]
        await events.send(chunks)
