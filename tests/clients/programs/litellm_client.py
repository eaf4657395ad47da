"""LiteLLM under each provider that speaks this API: whole, streamed, without waiting, as text, with a cache mark."""

from __future__ import annotations

import asyncio
import sys

import litellm

MODEL = "smollm2-135m-instruct"
QUESTION = [{"role": "user", "content": "Name three primary colours."}]
MARKED = [{"role": "user", "content": [{"type": "text", "text": "Say hello.", "cache_control": {"type": "ephemeral"}}]}]


def main(url: str) -> None:
    settings = {"api_base": f"{url}/v1", "api_key": "unused", "max_tokens": 24, "num_retries": 0}
    for provider in ("openai", "hosted_vllm"):
        asked = {**settings, "model": f"{provider}/{MODEL}", "messages": QUESTION, "temperature": 0}
        whole = litellm.completion(**asked)
        assert whole.choices[0].message.content
        chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        assert text == whole.choices[0].message.content
        assert any(getattr(chunk, "usage", None) for chunk in chunks)
        assert asyncio.run(litellm.acompletion(**asked)).choices[0].message.content == text
        assert litellm.completion(**{**asked, "messages": MARKED}).choices[0].message.content
    completion = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt="One, two,", **settings)
    assert completion.choices[0].text


if __name__ == "__main__":
    main(sys.argv[1])
