"""Logprobs as OpenAI's two routes show them."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from service.choice import ChoiceDelta
from service.responses import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from service.tokenizer import Tokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have; OpenAI's choice."""


def spelled(token: bytes) -> str:
    """A token's bytes as text; where they are not whole characters, as OpenAI writes those."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def chat_logprobs(delta: ChoiceDelta, tokenizer: Tokenizer) -> ChatLogprobs | None:
    """A delta's logprobs, if the request wanted any."""
    if delta.logprobs is None:
        return None

    def top(token_id: int, logprob: float) -> TopLogprob:
        token = tokenizer.spelling(token_id)
        return TopLogprob(spelled(token), max(logprob, LOWEST), list(token))

    content = []
    for token_id, row in zip(delta.token_ids, delta.logprobs, strict=True):
        assert row is not None
        own = top(token_id, row.logprob)
        others = [top(*pair) for pair in zip(row.top_token_ids, row.top_logprobs, strict=True)]
        content.append(ChatTokenLogprob(own.token, own.logprob, own.bytes, others))
    return ChatLogprobs(content)


def completion_logprobs(delta: ChoiceDelta, tokenizer: Tokenizer) -> CompletionLogprobs | None:
    """The same for text completions, where the alternatives include the token itself."""
    if delta.logprobs is None:
        return None
    tokens = [spelled(tokenizer.spelling(token_id)) for token_id in delta.token_ids]
    top: list[dict[str, float] | None] = []
    for token, row in zip(tokens, delta.logprobs, strict=True):
        if row is None:
            top.append(None)
            continue
        pairs = zip(row.top_token_ids, row.top_logprobs, strict=True)
        others = {spelled(tokenizer.spelling(token_id)): max(logprob, LOWEST) for token_id, logprob in pairs}
        top.append({**others, token: max(row.logprob, LOWEST)})
    own = [None if row is None else max(row.logprob, LOWEST) for row in delta.logprobs]
    return CompletionLogprobs(tokens, own, top, delta.offsets)


def prompt_logprobs(delta: ChoiceDelta, tokenizer: Tokenizer) -> PromptLogprobs | UnsetType:
    """Logprobs of a prompt's tokens as vLLM shows them, if the request wanted any."""
    if delta.prompt_logprobs is None:
        return UNSET
    shown: PromptLogprobs = []
    for token_id, row in delta.prompt_logprobs:
        if row is None:
            shown.append(None)
            continue
        ranked = zip(row.top_token_ids, row.top_logprobs, range(1, len(row.top_token_ids) + 1), strict=True)
        entries = [*ranked, (token_id, row.logprob, row.rank)]
        shown.append(
            {
                str(each): PromptLogprob(max(logprob, LOWEST), rank, spelled(tokenizer.spelling(each)))
                for each, logprob, rank in entries
            }
        )
    return shown
