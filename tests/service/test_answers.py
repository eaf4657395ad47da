"""Answers over REST, whole and streamed, from a scripted engine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.service.conftest import Service

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
PROMPT = "The quick brown fox jumps over the lazy dog."


def chat(text: str = PROMPT, **fields: Any) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}], "seed": 0, **fields}


def streamed_text(events: list[Any]) -> str:
    """What a client of either route sees, put together."""
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


async def test_a_completion_carries_its_bill(service: Service) -> None:
    """Text, usage, seed and metrics are there and agree with one another."""
    status, body = await service.post(TEXT, {"prompt": PROMPT, "max_tokens": 6, "seed": 5})
    assert status == 200
    assert body["object"] == "text_completion"
    assert body["seed"] == 5
    assert body["choices"][0]["finish_reason"] == "length"
    usage, metrics = body["usage"], body["metrics"]
    assert usage["completion_tokens"] == metrics["timing"]["tokens"] == 6
    assert usage["total_tokens"] == usage["prompt_tokens"] + 6
    guessed = metrics["speculative_decoding"]
    assert guessed["num_spec_steps"] == sum(guessed["acceptance_histogram"]) == 2
    assert guessed["mean_acceptance_length"] == 1 + guessed["num_accepted_draft_tokens"] / guessed["num_spec_steps"]
    assert set(usage["completion_tokens_details"].values()) == {0}


async def test_a_predicted_output_is_billed(service: Service) -> None:
    """Usage says how much of the client's prediction was in the answer, and how much was tried in vain."""
    prediction = {"type": "content", "content": "The quick"}
    _, body = await service.post(CHAT, chat(max_tokens=6, prediction=prediction))
    details = body["usage"]["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 2}


@pytest.mark.parametrize("max_tokens", [1, 2, 9])
async def test_end_to_end_is_ttft_and_the_other_tokens(service: Service, max_tokens: int) -> None:
    """The parts of a request's time add up by definition."""
    _, body = await service.post(CHAT, chat(max_tokens=max_tokens))
    timing = body["metrics"]["timing"]
    assert timing["end_to_end"] == pytest.approx(timing["ttft"] + (max_tokens - 1) * timing["tpot"])
    assert timing["queue"] + timing["prefill"] > 0


@pytest.mark.parametrize("speculation", ["none", "ngram"])
@pytest.mark.parametrize("fields", [{}, {"stop": ["fox", "j"]}, {"max_tokens": 3}, {"stop": "dog", "min_tokens": 60}])
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_stream_adds_up_to_the_whole(
    service: Service, path: str, fields: dict[str, Any], speculation: str
) -> None:
    """Streamed and whole answers have the same text, token ids, reason, usage and seed."""
    body = chat(**fields) if path == CHAT else {"prompt": PROMPT, "seed": 0, "max_tokens": 90, **fields}
    body |= {"speculation": speculation, "return_token_ids": True}
    _, whole = await service.post(path, body)
    events = await service.events(path, {**body, "stream_options": {"include_usage": True}})
    choice = whole["choices"][0]
    assert events[-1] == "[DONE]"
    assert streamed_text(events) == (choice["text"] if path == TEXT else choice["message"]["content"])
    parts = [part for event in events[:-2] for part in event["choices"]]
    assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [choice["finish_reason"]]
    assert events[-2]["choices"] == []
    assert events[-2]["usage"] == whole["usage"]
    assert events[-2]["seed"] == whole["seed"]
    assert whole["usage"]["completion_tokens"] == len(choice["token_ids"])
    assert {event["id"] for event in events[:-1]} == {events[0]["id"]}


async def test_speculation_changes_no_answer(service: Service) -> None:
    """One token a step or three: text, tokens and usage are the same, also around a stop string."""
    answers = []
    for speculation in ("none", "ngram", "fast", {"method": "ngram", "num_speculative_tokens": 3}):
        _, body = await service.post(TEXT, {"prompt": PROMPT, "seed": 0, "stop": "lazy", "speculation": speculation})
        answers.append((body["choices"], body["usage"]["completion_tokens"]))
    assert answers == [answers[0]] * 4


async def test_the_last_chunk_carries_the_bill_without_a_usage_chunk(service: Service) -> None:
    """A stream that did not ask for usage has metrics and seed in its last chunk, and usage nowhere."""
    events = await service.events(CHAT, chat(max_tokens=4))
    *chunks, last, done = events
    assert done == "[DONE]"
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["metrics"]["timing"]["tokens"] == 4
    assert last["seed"] == 0
    assert not any("usage" in event or "metrics" in event for event in chunks)
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"


async def test_the_token_that_ends_an_answer_is_not_part_of_it(service: Service) -> None:
    """After an end token the reason is stop; the token is not in text, ids, logprobs or usage."""
    _, body = await service.post(CHAT, chat("ab", logprobs=True, return_token_ids=True))
    choice = body["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] is None
    assert 2 not in choice["token_ids"]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == body["usage"]["completion_tokens"]
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == choice["message"]["content"]


async def test_a_stop_string_ends_text_logprobs_and_usage(service: Service) -> None:
    """What a stop string cut off is neither shown nor counted, and the response says which string it was."""
    _, free = await service.post(TEXT, {"prompt": PROMPT, "max_tokens": 60, "seed": 0, "logprobs": 1})
    _, cut = await service.post(TEXT, {"prompt": PROMPT, "max_tokens": 60, "seed": 0, "logprobs": 1, "stop": " fox"})
    choice = cut["choices"][0]
    assert choice["text"] == free["choices"][0]["text"].partition(" fox")[0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", " fox")
    assert cut["usage"]["completion_tokens"] == len(choice["logprobs"]["tokens"])
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    await service.until_idle()


async def test_a_stop_token_is_named(service: Service) -> None:
    """A token of `stop_token_ids` ends the answer, is not part of it, and is named as the reason."""
    _, body = await service.post(TEXT, {"prompt": [70, 71, 72, 73], "stop_token_ids": [72], "seed": 0})
    assert body["choices"][0]["stop_reason"] == 72
    assert body["usage"]["completion_tokens"] == 2


async def test_choices_of_a_request_have_seeds_of_their_own(service: Service) -> None:
    """Choice i of n is what a request with the seed + i gives, streamed or not, and 2**64 - 1 is followed by 0."""
    seed = 2**64 - 1
    _, body = await service.post(CHAT, chat(n=3, max_tokens=5, seed=seed))
    texts = [choice["message"]["content"] for choice in body["choices"]]
    for i, text in enumerate(texts):
        _, alone = await service.post(CHAT, chat(max_tokens=5, seed=(seed + i) % 2**64))
        assert alone["choices"][0]["message"]["content"] == text
    assert body["usage"]["completion_tokens"] == 15
    events = await service.events(CHAT, chat(n=3, max_tokens=5, seed=seed))
    for index in range(3):
        parts = [c for event in events[:-1] for c in event["choices"] if c["index"] == index]
        assert "".join(part["delta"].get("content", "") for part in parts) == texts[index]
    assert sum("metrics" in event for event in events[:-1]) == 1


async def test_the_service_draws_a_seed_and_says_which(service: Service) -> None:
    """Without a seed each request gets another one, and sending it again gives the same answer."""
    body = {"prompt": PROMPT, "max_tokens": 5}
    _, first = await service.post(TEXT, body)
    _, second = await service.post(TEXT, body)
    assert first["seed"] != second["seed"]
    _, again = await service.post(TEXT, {**body, "seed": first["seed"]})
    assert again["choices"] == first["choices"]


async def test_chat_logprobs_have_the_alternatives_asked_for(service: Service) -> None:
    """Each token has its logprob, its bytes and so many alternatives; minus infinity is a number JSON has."""
    _, body = await service.post(CHAT, chat(max_tokens=3, logprobs=True, top_logprobs=2))
    for entry in body["choices"][0]["logprobs"]["content"]:
        assert entry["logprob"] == -0.5
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, -9999.0]


async def test_half_characters_are_spelled_out_in_logprobs(service: Service) -> None:
    """A token that is part of a character is shown as its bytes; the text has the whole character."""
    _, body = await service.post(TEXT, {"prompt": "\u2603", "logprobs": 0, "seed": 0, "max_tokens": 9})
    choice = body["choices"][0]
    assert choice["text"] == "\u2603"
    assert all(token.startswith("bytes:\\x") for token in choice["logprobs"]["tokens"])
    assert choice["logprobs"]["text_offset"] == [0] * len(choice["logprobs"]["tokens"])


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_prompt_before_the_answer(service: Service, stream: bool) -> None:
    """Text, logprobs and offsets begin with the prompt's, whose first token has no logprob; usage counts the answer."""
    body = {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 4, "seed": 0, "return_token_ids": True}
    if stream:
        choices = [choice for event in (await service.events(TEXT, body))[:-1] for choice in event["choices"]]
    else:
        _, whole = await service.post(TEXT, body)
        choices = whole["choices"]
        assert whole["usage"]["completion_tokens"] == 4
    text = "".join(choice["text"] for choice in choices)
    rows = [row for choice in choices for row in zip(*choice["logprobs"].values(), strict=True)]
    assert text.startswith(PROMPT)
    assert rows[0][1:] == (None, None, 0)
    assert [text[offset : offset + len(token)] for token, _, _, offset in rows] == [row[0] for row in rows]
    assert "".join(row[0] for row in rows) == text


async def test_a_prompt_is_scored_without_an_answer(service: Service) -> None:
    """`max_tokens` 0 with echo gives the prompt and its logprobs, and nothing else."""
    _, body = await service.post(TEXT, {"prompt": PROMPT, "echo": True, "logprobs": 0, "max_tokens": 0})
    choice = body["choices"][0]
    assert choice["text"] == PROMPT
    assert choice["finish_reason"] == "length"
    assert "".join(choice["logprobs"]["tokens"]) == PROMPT
    assert body["usage"]["completion_tokens"] == 0


async def test_prompts_come_in_four_forms(service: Service) -> None:
    """A text, texts, token ids and lists of them are told apart; several prompts make several choices, in order."""
    _, one = await service.post(TEXT, {"prompt": "ab", "seed": 0})
    ids = service.front.model.tokenizer.encode("ab")
    for prompt in (ids, [ids], ["ab"]):
        _, body = await service.post(TEXT, {"prompt": prompt, "seed": 0})
        assert [choice["text"] for choice in body["choices"]] == [one["choices"][0]["text"]]
    _, body = await service.post(TEXT, {"prompt": ["ab", [70, 71], "cd"], "n": 2, "max_tokens": 1, "seed": 0})
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert body["usage"]["prompt_tokens"] == len(ids) * 2 + 2


async def test_content_can_come_in_parts_and_roles_have_another_name(service: Service) -> None:
    """Text parts are joined, and `developer` is the system's newer name: the prompt is the same."""
    parts = [{"type": "text", "text": "The quick "}, {"type": "text", "text": "fox"}]
    one = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The quick fox"}]
    other = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    answers = [
        await service.post(CHAT, {"messages": messages, "seed": 1, "max_tokens": 9}) for messages in (one, other)
    ]
    assert answers[0][1]["usage"] == answers[1][1]["usage"]
    assert answers[0][1]["choices"] == answers[1][1]["choices"]


async def test_an_answer_can_be_sent_back_as_it_came(service: Service) -> None:
    """The message of a response, with all its fields, is a message of the next request."""
    _, body = await service.post(CHAT, chat(max_tokens=3))
    message = body["choices"][0]["message"]
    status, _ = await service.post(CHAT, {"messages": [{"role": "user", "content": "a"}, message], "max_tokens": 3})
    assert status == 200


async def test_fields_without_effect_are_accepted(service: Service) -> None:
    """What OpenAI's clients send and this service has no use for changes nothing; null is the same as nothing."""
    harmless: dict[str, Any] = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "tools": [],
        "temperature": None,
        "stop": None,
        "response_format": {"type": "text"},
        "model": None,
    }
    _, plain = await service.post(CHAT, chat(max_tokens=3))
    status, body = await service.post(CHAT, chat(max_tokens=3, **harmless))
    assert status == 200
    assert body["choices"] == plain["choices"]


async def test_a_request_keeps_its_id(service: Service) -> None:
    """The client's X-Request-Id comes back, on streams and errors too; without one, or with a bad one, it is drawn."""
    for body in (chat(max_tokens=1), chat(max_tokens=1, stream=True), {}):
        async with service.client.post(service.url + CHAT, json=body, headers={"X-Request-Id": "abc-1"}) as response:
            assert response.headers["X-Request-Id"] == "abc-1"
            await response.read()
    async with service.client.get(service.url + "/health/live", headers={"X-Request-Id": "a b"}) as response:
        assert len(response.headers["X-Request-Id"]) == 32
