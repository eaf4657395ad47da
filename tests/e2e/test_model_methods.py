"""Methods that need a model of their own, over HTTP: a draft model and Medusa heads beside the embedded model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from target.checkpoint import truncate_checkpoint
from target.embedded import embedded_model_dir
from target.errors import CheckpointError
from target.hf_config import read_config
from tests.e2e.server import Server
from tests.tiny_medusa import write_repeating_medusa

METHODS: dict[str, dict[str, Any]] = {
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 3},
    "draft_model, tree": {"method": "draft_model", "num_speculative_tokens": 3, "tree_size": 8},
    "medusa": {"method": "medusa", "num_speculative_tokens": 2},
    "medusa, tree": {"method": "medusa", "num_speculative_tokens": 2, "tree_size": 8},
}
PROMPTS = ["no no no no no no no no no", "Count: 1, 2, 3, 4,"]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 7, "min_p": 0.05, "logit_bias": {"28": 2.0}, "min_tokens": 12},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A service whose draft model is the embedded model's first layers, and whose heads repeat a token."""
    try:
        target = embedded_model_dir()
    except CheckpointError:
        pytest.skip("the embedded model is not fetched; `forerun fetch` fetches it")
    folder = tmp_path_factory.mktemp("models")
    truncate_checkpoint(target, folder / "draft", 3)
    write_repeating_medusa(folder / "medusa", read_config(target).hidden_size)
    flags = ["--num-blocks", "64", "--check-invariants", "--max-model-len", "512", "--eagle3", "none"]
    flags += ["--draft-model", str(folder / "draft"), "--medusa", str(folder / "medusa")]
    with Server(folder / "log", *flags) as running:
        yield running


async def ask(client: aiohttp.ClientSession, server: Server, body: dict[str, Any]) -> dict[str, Any]:
    async with client.post(f"{server.url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        answer: dict[str, Any] = await response.json()
        return answer


async def streamed(client: aiohttp.ClientSession, server: Server, body: dict[str, Any]) -> list[int]:
    """The tokens of a streamed answer."""
    async with client.post(f"{server.url}/v1/completions", json={**body, "stream": True}) as response:
        blocks = (await response.text()).split("\n\n")
    events = [block.removeprefix("data: ") for block in blocks if block.startswith("data: ")]
    assert events[-1] == "[DONE]"
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    return [token for choice in choices for token in choice["token_ids"]]


@pytest.mark.parametrize("method", METHODS)
async def test_a_model_s_guesses_change_no_answer(server: Server, method: str) -> None:
    """Alone, together and streamed, greedy and sampled: the tokens of plain decoding, with guesses, some accepted."""
    bodies: list[dict[str, Any]] = [
        {"prompt": prompt, "max_tokens": 16, "return_token_ids": True, "speculation": "none", **sampling}
        for prompt in PROMPTS
        for sampling in SAMPLINGS
    ]
    guessing = [{**body, "speculation": METHODS[method]} for body in bodies]
    async with aiohttp.ClientSession() as client:
        expected = await asyncio.gather(*(ask(client, server, body) for body in bodies))
        alone = [await ask(client, server, body) for body in guessing]
        streams = await asyncio.gather(*(streamed(client, server, body) for body in guessing))
    tokens = [answer["choices"][0]["token_ids"] for answer in expected]
    assert all(tokens)
    assert [answer["choices"][0]["token_ids"] for answer in alone] == tokens
    assert streams == tokens
    guessed = [answer["metrics"]["speculative_decoding"] for answer in alone]
    assert all(counts["num_draft_tokens"] > 0 for counts in guessed)
    assert sum(counts["num_accepted_draft_tokens"] for counts in guessed) > 0
    await asyncio.to_thread(server.wait_until_idle)
