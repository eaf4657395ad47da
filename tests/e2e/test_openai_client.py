"""The official `openai` client against the running service and the embedded model."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.server import Server

MESSAGES: Any = [{"role": "user", "content": "Repeat after me: one two three four five six seven."}]


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def model_of(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_models(client: openai.OpenAI) -> None:
    """The served model is listed and can be asked for by its name."""
    name = model_of(client)
    assert client.models.retrieve(name).id == name
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_the_printed_curl_works(server: Server) -> None:
    """The one command that the service prints at its start gets an answer."""
    command = server.greeting[server.greeting.index("curl ") :]
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_a_chat_has_the_same_answer_streamed_and_whole(client: openai.OpenAI) -> None:
    """Content, reason and usage agree, and both carry the seed and the metrics."""
    asked: dict[str, Any] = {"model": model_of(client), "messages": MESSAGES, "max_tokens": 24, "seed": 7}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    for answer in (whole, chunks[-1]):
        extra = answer.model_extra
        assert extra is not None
        assert extra["seed"] == 7
        timing = extra["metrics"]["timing"]
        assert timing["end_to_end"] == pytest.approx(timing["ttft"] + (timing["tokens"] - 1) * timing["tpot"])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculation_and_its_absence_give_the_same_answer(client: openai.OpenAI, temperature: float) -> None:
    """Greedy and sampled, with lookup and without: the same text for the same seed, and guesses that were accepted."""
    answers = [
        client.chat.completions.create(
            model=model_of(client),
            messages=MESSAGES,
            max_tokens=32,
            temperature=temperature,
            top_p=0.95,
            seed=11,
            extra_body={"speculation": {"method": method}},
        )
        for method in ("none", "ngram")
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    extra = answers[0].model_extra
    assert extra is not None
    assert extra["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    assert extra["metrics"]["speculative_decoding"]["skipped"].keys() == {"disabled"}


def test_logprobs_belong_to_the_tokens_of_the_text(client: openai.OpenAI) -> None:
    """Each token has its logprob and alternatives in falling order; greedy takes the first; they add up to the text."""
    answer = client.chat.completions.create(
        model=model_of(client), messages=MESSAGES, max_tokens=12, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == answer.choices[0].message.content
    for entry in logprobs.content:
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert entry.top_logprobs[0].token == entry.token
        assert entry.logprob == pytest.approx(values[0])
        assert entry.logprob <= 0


def test_choices_differ_and_can_be_had_again_alone(client: openai.OpenAI) -> None:
    """n choices are n answers; choice i comes again with the seed + i, with other requests beside it or without."""
    asked: dict[str, Any] = {"model": model_of(client), "messages": MESSAGES, "max_tokens": 12, "temperature": 1.2}
    answer = client.chat.completions.create(**asked, n=3, seed=100)
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) > 1
    for i, text in enumerate(texts):
        alone = client.chat.completions.create(**asked, seed=100 + i)
        assert alone.choices[0].message.content == text


def test_a_stop_string_ends_the_answer(client: openai.OpenAI) -> None:
    """The text ends before the stop string, with the reason, streamed or not."""
    asked: dict[str, Any] = {"model": model_of(client), "messages": MESSAGES, "max_tokens": 40, "temperature": 0}
    free = client.chat.completions.create(**asked).choices[0].message.content
    assert free is not None
    stop = free[len(free) // 2 : len(free) // 2 + 4]
    whole = client.chat.completions.create(**asked, stop=[stop, "never"]).choices[0]
    assert whole.message.content == free[: free.index(stop)]
    assert whole.finish_reason == "stop"
    chunks = list(client.chat.completions.create(**asked, stop=stop, stream=True))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.message.content


def test_completions_echo_and_score(client: openai.OpenAI) -> None:
    """A text completion can return its prompt with logprobs, with and without an answer, and takes token ids."""
    name = model_of(client)
    scored = client.completions.create(
        model=name, prompt="The capital of France is Paris.", echo=True, logprobs=2, max_tokens=0
    )
    rows: Any = scored.choices[0].logprobs
    assert rows.token_logprobs[0] is None
    assert all(value <= 0 for value in rows.token_logprobs[1:])
    assert scored.choices[0].text == "The capital of France is Paris."
    answer = client.completions.create(
        model=name, prompt="The capital of France is", echo=True, max_tokens=4, temperature=0
    )
    assert answer.choices[0].text.startswith("The capital of France is")
    ids = client.completions.create(model=name, prompt=[504, 3575, 282, 4649, 314], max_tokens=4, temperature=0)
    assert ids.choices[0].text
    streamed = client.completions.create(
        model=name, prompt="The capital of France is", max_tokens=4, temperature=0, stream=True
    )
    assert (
        "".join(chunk.choices[0].text for chunk in streamed)
        == answer.choices[0].text[len("The capital of France is") :]
    )


def test_mistakes_are_the_client_s_own_exceptions(client: openai.OpenAI) -> None:
    """Bad input raises the client's BadRequestError with the parameter's name."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model_of(client), messages=MESSAGES, temperature=9)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model_of(client), messages=MESSAGES, max_tokens=100_000)
    assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)


def test_a_repeated_prompt_is_found_in_the_cache(client: openai.OpenAI) -> None:
    """The second time a long prompt is cached, unless its salt is another."""
    text = "List of numbers: " + ", ".join(str(number) for number in range(60))

    def cached(salt: str) -> int:
        answer = client.completions.create(
            model=model_of(client), prompt=text, max_tokens=1, extra_body={"cache_salt": salt}
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert cached("one") == 0
    assert cached("one") >= 64
    assert cached("two") == 0
