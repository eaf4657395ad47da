"""The WebSocket against the running service and the embedded model."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from tests.e2e.server import Server

REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": "Count: 1, 2, 3, 4, 5, 6, 7, 8,", "temperature": 0, "max_tokens": 24},
    "sampled": {"prompt": "The weather today is", "temperature": 0.9, "seed": 5, "max_tokens": 16},
    "plain": {"prompt": "Count: 1, 2, 3, 4, 5, 6,", "temperature": 0, "max_tokens": 16, "speculation": "none"},
    "chat": {"messages": [{"role": "user", "content": "Say hello in French 🎉"}], "seed": 1, "max_tokens": 16},
    "stopped": {"prompt": "Count: 1, 2, 3, 4, 5, 6, 7, 8,", "temperature": 0, "max_tokens": 24, "stop": "12"},
}


async def test_all_at_once_on_a_socket_is_one_by_one_over_rest(server: Server) -> None:
    """Generations side by side give, each, the text, tokens and reason that REST gives them alone."""
    messages: dict[str, list[dict[str, Any]]] = {name: [] for name in REQUESTS}
    async with aiohttp.ClientSession() as client:
        async with client.ws_connect(f"{server.url}/v1/stream") as ends:
            for name, request in REQUESTS.items():
                await ends.send_json({"type": "generate", "id": name, "request": request})
            while not all(entries and entries[-1]["type"] == "finished" for entries in messages.values()):
                message = json.loads(await ends.receive_str())
                assert message["type"] != "error", message
                messages[message["id"]].append(message)
        for name, request in REQUESTS.items():
            route = "chat/completions" if "messages" in request else "completions"
            body = {**request, "return_token_ids": True, "seed": messages[name][0]["seed"]}
            async with client.post(f"{server.url}/v1/{route}", json=body) as response:
                choice = (await response.json())["choices"][0]
            parts = [message for message in messages[name] if message["type"] == "tokens"]
            assert "".join(part["text"] for part in parts) == choice.get(
                "text", choice.get("message", {}).get("content")
            )
            assert [token["id"] for part in parts for token in part["tokens"]] == choice["token_ids"]
            assert messages[name][-1]["choices"][0]["finish_reason"] == choice["finish_reason"]


async def test_tokens_say_who_guessed_them(server: Server) -> None:
    """Sources and logprobs come with every token; the guessed ones are as many as the bill says."""
    async with aiohttp.ClientSession() as client, client.ws_connect(f"{server.url}/v1/stream") as ends:
        request = {**REQUESTS["greedy"], "speculation": "ngram"}
        await ends.send_json({"type": "generate", "id": "a", "request": request})
        messages: list[dict[str, Any]] = []
        while not messages or messages[-1]["type"] != "finished":
            messages.append(json.loads(await ends.receive_str()))
    tokens = [token for message in messages if message["type"] == "tokens" for token in message["tokens"]]
    assert {token["source"] for token in tokens} <= {"ngram", "target"}
    assert all(token["logprob"] <= 0 for token in tokens)
    guessed = messages[-1]["metrics"]["speculative_decoding"]
    assert sum(token["source"] == "ngram" for token in tokens) == guessed["num_accepted_draft_tokens"]


@pytest.mark.parametrize("request_name", ["greedy", "chat"])
async def test_a_socket_that_closes_leaves_no_block_in_use(server: Server, request_name: str) -> None:
    """Closing the socket right behind a request frees what it held."""
    async with aiohttp.ClientSession() as client, client.ws_connect(f"{server.url}/v1/stream") as ends:
        request = {**REQUESTS[request_name], "max_tokens": 300, "ignore_eos": True}
        await ends.send_json({"type": "generate", "id": "a", "request": request})
        await ends.receive_str()
    server.wait_until_idle()
