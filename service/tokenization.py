"""What POST /tokenize asks for: the token ids of a text or of a conversation, in vLLM's shape."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from service.conversation import rendered_conversation
from service.errors import ApiError
from service.large_request_messages import Tokenized
from service.schema import ChatCompletionRequest, Message, TemplateInteger
from service.served_model import ServedModel
from service.tokenizer import TooManyTokensError

MAX_TOKENS = 2**20
"""Most tokens of a text that is tokenized."""


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /tokenize: `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    """Whether a text gets the tokens that the model wants around it; true is the default."""
    parse_special: bool | None = None
    """Whether control tokens spelled out in a text are control; true is the default, as in vLLM and llama.cpp."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, str | bool | TemplateInteger | float | None] | None = None
    return_token_strs: bool | None = None
    """Whether the response has `token_strs`."""


def tokenized(request: TokenizeRequest, model: ServedModel) -> Tokenized:
    """The token ids. Raises `ApiError`; call it in a thread."""
    model.check_name(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise ApiError.invalid("prompt", "the body must have either prompt (a text) or messages (a conversation)")
    field = "messages" if request.prompt is None else "prompt"
    try:
        token_ids = _token_ids(request, model)
    except TooManyTokensError as error:
        raise ApiError.invalid(field, f"{field} has {error} tokens; at most {MAX_TOKENS} are returned") from None
    return Tokenized(token_ids=token_ids, with_token_strs=bool(request.return_token_strs))


def _token_ids(request: TokenizeRequest, model: ServedModel) -> list[int]:
    if request.prompt is not None:
        return model.tokenizer.encode(
            request.prompt,
            parse_special=request.parse_special is not False,
            add_special=request.add_special_tokens is not False,
            most=MAX_TOKENS,
        )
    if model.template is None:
        raise ApiError.invalid("messages", "the model has no chat template; use prompt", code="no_chat_template")
    chat = ChatCompletionRequest(
        messages=request.messages or [],
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        chat_template_kwargs=request.chat_template_kwargs,
    )
    text = rendered_conversation(chat, model.template, model.tokenizer.protect)
    return model.tokenizer.encode_rendered(text, most=MAX_TOKENS)
