"""Process that parses and tokenizes large requests for the front: `python -m service.large_request_worker`.

Its standard input is a socket on which the front sends frames (`speculation.framing`): one `Load`, then `Parse`
messages with a body behind each, answered one by one. It exits when the front closes the socket or dies.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path

import msgspec

from service.errors import ApiError
from service.interpreter import Interpreter
from service.large_request_messages import Failed, FromWorker, Load, Parse, Parsed, Refused, ToWorker
from service.memory import keep_heap_small
from service.schema import ChatCompletionRequest, CompletionRequest, GenerationBody, GenerationRequest
from service.served_model import ServedModel
from service.settings import LimitSettings
from service.socket_messages import Incoming, parse_generate
from service.tokenization import TokenizeRequest, tokenized
from service.validation import parse_body, parse_generation
from speculation.framing import encode_frame, read_frame

NICENESS = 10
"""Added to the front's niceness: its event loop and the engine's steps go first."""

_DECODER = msgspec.msgpack.Decoder(ToWorker)


def serve(connection: socket.socket) -> None:
    """Answer messages until the front closes the connection."""
    model: ServedModel | None = None
    limits = LimitSettings()
    with connection.makefile("rb") as received:
        while (message := read_frame(received, _DECODER)) is not None:
            if isinstance(message, Load):
                folder = Path(message.folder)
                model = ServedModel.load(message.model_name, folder, message.ready, message.sampling)
                limits = message.limits
            else:
                assert model is not None
                body = received.read(message.num_bytes)
                connection.sendall(encode_frame(answer(message, body, model, limits)))


def answer(message: Parse, body: bytes, model: ServedModel, limits: LimitSettings) -> FromWorker:
    """The parsed and tokenized request, or why there is none."""
    message_id: str | None = None
    try:
        if message.kind == "socket":
            incoming = parse_body(body, Incoming)
            message_id = incoming.id
            if incoming.type != "generate":
                raise ApiError.invalid("type", "type must be 'generate' in a message of this size")
            received = parse_generate(body, message.unknown_fields)[1]
        elif message.kind == "tokenize":
            return tokenized(parse_body(body, TokenizeRequest), model)
        elif message.kind == "chat":
            received = parse_generation(body, ChatCompletionRequest, message.unknown_fields)
        else:
            received = parse_generation(body, CompletionRequest, message.unknown_fields)
        generation = Interpreter(model, limits, message.profiles).generation("", received)
        return Parsed(message_id=message_id or "", request=_without_texts(received.request), generation=generation)
    except ApiError as error:
        return Refused(message_id=message_id, status=error.status, error=error.body)
    except Exception as error:  # noqa: BLE001 - the front logs it; the next request may be fine
        return Failed(
            message_id=message_id, traceback=traceback.format_exc(), is_memory_error=isinstance(error, MemoryError)
        )


def _without_texts(request: GenerationBody) -> GenerationRequest:
    """The fields that the front still needs, none of which takes long to decode."""
    return GenerationRequest(
        n=request.n,
        stream=request.stream,
        stream_options=request.stream_options,
        return_token_ids=request.return_token_ids,
        prompt_logprobs=request.prompt_logprobs,
        request_id=request.request_id,
        speculation=request.speculation,
        user=request.user,
    )


def main() -> None:
    """Serve the front that started this process."""
    os.nice(NICENESS)
    keep_heap_small()
    with socket.socket(fileno=sys.stdin.fileno()) as connection, suppress(ConnectionError):
        serve(connection)


if __name__ == "__main__":
    main()
