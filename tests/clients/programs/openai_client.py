"""The openai library: lists, chats, streams, completes, and passes fields of its own through."""

from __future__ import annotations

import asyncio
import sys

import openai

QUESTION = [{"role": "user", "content": "Name three primary colours."}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "Say hello."}]}]


def is_refused(client: openai.OpenAI, model: str) -> bool:
    """Whether a model's name is answered with 404 and named in the error."""
    try:
        client.chat.completions.create(model=model, messages=QUESTION)
    except openai.NotFoundError as error:
        return model in error.message
    return False


def main(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=120)
    model = client.models.list().data[0].id
    assert client.models.retrieve(model).id == model
    chat = client.chat.completions.create

    whole = chat(model=model, messages=QUESTION, max_tokens=32, temperature=0)
    assert whole.choices[0].message.content
    chunks = list(
        chat(
            model=model,
            messages=QUESTION,
            max_tokens=32,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens

    plain = chat(model=model, messages=QUESTION, max_tokens=32, temperature=0, extra_body={"speculation": "none"})
    assert plain.choices[0].message.content == text
    history = [*QUESTION, whole.choices[0].message.model_dump(), {"role": "user", "content": "And one more?"}]
    assert chat(model=model, messages=history, max_tokens=8).choices[0].message.content
    several = chat(model=model, messages=PARTS, max_tokens=8, n=3, logprobs=True, top_logprobs=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert all(len(token.top_logprobs) == 2 for token in several.choices[0].logprobs.content)
    predicted = chat(
        model=model, messages=QUESTION, max_tokens=32, temperature=0, prediction={"type": "content", "content": text}
    )
    assert predicted.choices[0].message.content == text
    completion = client.completions.create(model=model, prompt=["One, two,", "A, b,"], max_tokens=8, echo=True)
    assert [choice.text.startswith(begin) for choice, begin in zip(completion.choices, ("One", "A"), strict=True)]

    async def at_once() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=120) as client:
            asked = (client.chat.completions.create(model=model, messages=QUESTION, max_tokens=8) for _ in range(4))
            return [answer.choices[0].message.content for answer in await asyncio.gather(*asked)]

    assert all(asyncio.run(at_once()))
    assert is_refused(client, "no-such-model")


if __name__ == "__main__":
    main(sys.argv[1])
