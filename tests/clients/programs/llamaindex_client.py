"""LlamaIndex's OpenAILike: chat and completion, whole, streamed and without waiting."""

from __future__ import annotations

import asyncio
import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

MODEL = "smollm2-135m-instruct"
QUESTION = "Name three primary colours."


def main(url: str) -> None:
    settings = {
        "api_base": f"{url}/v1",
        "api_key": "unused",
        "model": MODEL,
        "context_window": 8192,
        "max_tokens": 24,
        "temperature": 0,
        "max_retries": 0,
    }
    chat = OpenAILike(**settings, is_chat_model=True)
    messages = [ChatMessage(role="system", content="You are terse."), ChatMessage(role="user", content=QUESTION)]
    whole = chat.chat(messages).message.content
    assert whole
    assert "".join(part.delta or "" for part in chat.stream_chat(messages)) == whole
    assert asyncio.run(chat.achat(messages)).message.content == whole
    assert chat.complete(QUESTION).text
    text = OpenAILike(**settings, is_chat_model=False)
    assert text.complete("One, two, three,").text


if __name__ == "__main__":
    main(sys.argv[1])
