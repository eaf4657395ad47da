"""POST /tokenize, POST /detokenize and GET /tokenizer_info, as vLLM has them: for evaluation and counting tools."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta

from service.bodies import read_body, received_body
from service.body_budget import SMALL_BODY_BYTES
from service.context import FRONT
from service.errors import ApiError, shorten
from service.large_request_messages import Tokenized
from service.large_requests import answered
from service.schema import TokenId
from service.service_routes import json_response
from service.token_logprobs import spelled
from service.tokenization import TokenizeRequest, tokenized
from service.validation import parse_body


class TokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The body that answers POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Meta(max_length=2**20)]


async def tokenize(request: web.Request) -> web.Response:
    """The token ids of a text or a conversation, and how many there are."""
    front = request.app[FRONT]
    model = front.model
    async with received_body(request) as pieces:
        if sum(map(len, pieces)) > SMALL_BODY_BYTES:
            found = answered(await front.parse_large("tokenize", pieces))
            assert isinstance(found, Tokenized)
        else:
            body = parse_body(b"".join(pieces), TokenizeRequest)
            found = await asyncio.to_thread(tokenized, body, model)
    ids, spelling = found.token_ids, model.tokenizer.spelling
    strings = [spelled(spelling(token_id)) for token_id in ids] if found.with_token_strs else None
    return json_response(
        TokenizeResponse(count=len(ids), max_model_len=model.context_length, tokens=ids, token_strs=strings)
    )


async def detokenize(request: web.Request) -> web.Response:
    """The text of token ids, control tokens included."""
    model = request.app[FRONT].model
    body = parse_body(await read_body(request), DetokenizeRequest)
    model.check_name(body.model)
    for index, token_id in enumerate(body.tokens):
        if token_id >= model.ready.vocab_size:
            most = model.ready.vocab_size - 1
            raise ApiError.invalid(
                f"tokens[{index}]", f"tokens[{index}] is {shorten(token_id)}; token ids are integers from 0 to {most}"
            )
    text = b"".join(map(model.tokenizer.spelling, body.tokens)).decode("utf-8", "replace")
    return json_response({"prompt": text})


async def tokenizer_info(request: web.Request) -> web.Response:
    """The model's `tokenizer_config.json`, with the chat template that is used."""
    model = request.app[FRONT].model
    path = model.folder / "tokenizer_config.json"
    config: dict[str, Any] = {}
    if path.is_file():
        found = msgspec.json.decode(await asyncio.to_thread(path.read_bytes))
        config = found if isinstance(found, dict) else {}
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    tokens = {name: value["content"] for name in names if isinstance(value := config.get(name), dict)}
    template = {} if model.template is None else {"chat_template": model.template.source}
    return json_response({"tokenizer_class": "PreTrainedTokenizerFast", **config, **tokens, **template})
