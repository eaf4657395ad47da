"""LangChain's ChatOpenAI and OpenAI: one answer, a stream, a batch, without waiting, and token counts."""

from __future__ import annotations

import asyncio
import sys

from langchain_openai import ChatOpenAI, OpenAI

MODEL = "smollm2-135m-instruct"
QUESTION = "Name three primary colours."


def main(url: str) -> None:
    settings = {"base_url": f"{url}/v1", "api_key": "unused", "model": MODEL, "max_tokens": 24, "max_retries": 0}
    chat = ChatOpenAI(**settings, temperature=0, stream_usage=True)
    whole = chat.invoke(QUESTION)
    assert whole.content
    assert whole.usage_metadata["output_tokens"] > 0
    parts = list(chat.stream(QUESTION))
    assert "".join(part.content for part in parts) == whole.content
    assert sum(part.usage_metadata["output_tokens"] for part in parts if part.usage_metadata) > 0
    assert all(answer.content for answer in chat.batch([QUESTION, "Say hello.", "Count to five."]))
    assert asyncio.run(chat.ainvoke(QUESTION)).content == whole.content
    assert chat.bind(logprobs=True).invoke(QUESTION).response_metadata["logprobs"]["content"]
    assert OpenAI(**settings).invoke("One, two, three,")


if __name__ == "__main__":
    main(sys.argv[1])
