"""REST and SSE against the running service and the embedded model: what a stream is made of."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
import tokenizers

from target.embedded import embedded_model_dir
from tests.e2e.server import Server

PROMPTS = [
    "Translate to Greek: good morning → καλημέρα. good night →",
    "🎉🎂🎈 🎉🎂🎈 🎉🎂🎈 🎉",
    "日本語: こんにちは、世界。こんにちは、",
]


async def post(client: aiohttp.ClientSession, server: Server, body: dict[str, Any]) -> Any:
    async with client.post(f"{server.url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def events(client: aiohttp.ClientSession, server: Server, body: dict[str, Any]) -> list[Any]:
    """The JSON events of a stream, up to [DONE]."""
    async with client.post(f"{server.url}/v1/completions", json={**body, "stream": True}) as response:
        blocks = (await response.text()).split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2] if block.startswith("data: ")]


@pytest.mark.parametrize("speculation", ["none", "ngram"])
@pytest.mark.parametrize("prompt", PROMPTS)
async def test_characters_of_several_tokens_arrive_whole(server: Server, prompt: str, speculation: str) -> None:
    """Where a character is several tokens, the deltas add up to the whole, as the tokenizers library has it."""
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "speculation": speculation, "return_token_ids": True}
    async with aiohttp.ClientSession() as client:
        whole = (await post(client, server, body))["choices"][0]
        deltas = [event["choices"][0] for event in await events(client, server, body)]
    assert "".join(delta["text"] for delta in deltas) == whole["text"]
    assert [token for delta in deltas for token in delta["token_ids"]] == whole["token_ids"]
    library = tokenizers.Tokenizer.from_file(str(embedded_model_dir() / "tokenizer.json"))
    assert library.decode(whole["token_ids"]) == whole["text"]


async def test_a_stop_string_is_found_wherever_tokens_break(server: Server) -> None:
    """Every short piece of an answer, as a stop string, ends it before its first occurrence, guesses or not."""
    body = {"prompt": "Count: one two three four one two three four one two", "max_tokens": 16, "temperature": 0}
    async with aiohttp.ClientSession() as client:
        free = (await post(client, server, body))["choices"][0]["text"]
        for start in range(0, len(free) - 3, 7):
            stop = free[start : start + 3]
            asked = [{**body, "stop": stop, "speculation": speculation} for speculation in ("none", "ngram")]
            answers = await asyncio.gather(*(post(client, server, one) for one in asked))
            assert [answer["choices"][0]["text"] for answer in answers] == [free[: free.index(stop)]] * 2
            assert answers[0]["usage"]["completion_tokens"] == answers[1]["usage"]["completion_tokens"]


async def test_neighbours_do_not_change_an_answer(server: Server) -> None:
    """Sampled answers come out the same alone and among others, streamed or not."""
    bodies = [{"prompt": prompt, "max_tokens": 12, "temperature": 0.8, "seed": 3} for prompt in PROMPTS]
    async with aiohttp.ClientSession() as client:
        alone = [(await post(client, server, body))["choices"][0]["text"] for body in bodies]
        together = await asyncio.gather(
            *(post(client, server, body) for body in bodies), *(events(client, server, body) for body in bodies)
        )
    assert [answer["choices"][0]["text"] for answer in together[: len(bodies)]] == alone
    streamed = ["".join(event["choices"][0]["text"] for event in answer) for answer in together[len(bodies) :]]
    assert streamed == alone


async def test_bad_input_under_load_harms_nobody(server: Server) -> None:
    """While answers are generated, malformed and impossible requests are all 4xx, and the answers are right."""
    good = {"prompt": "Count: 1, 2, 3, 4,", "max_tokens": 24, "temperature": 0}
    bad = [b"{", b"[]", b'{"prompt": "x", "temperature": NaN}', b'{"prompt": "\\ud800"}', b'{"prompt": [99999999]}']
    bad += [json.dumps({"prompt": "x " * 5000}).encode(), json.dumps({"prompt": "x", "max_tokens": 10**6}).encode()]

    async def spoil(client: aiohttp.ClientSession, body: bytes) -> int:
        async with client.post(f"{server.url}/v1/completions", data=body) as response:
            assert (await response.json())["error"]["type"] == "invalid_request_error"
            return response.status

    async with aiohttp.ClientSession() as client:
        expected = (await post(client, server, good))["choices"]
        done = await asyncio.gather(
            *(post(client, server, good) for _ in range(6)), *(spoil(client, body) for body in bad * 10)
        )
    assert all(answer["choices"] == expected for answer in done[:6])
    assert all(400 <= status < 500 for status in done[6:])
    server.wait_until_idle()
