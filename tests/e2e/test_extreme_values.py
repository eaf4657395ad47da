"""Numbers at their extremes against a real engine: no value of a client may reach memory that is not there."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from tests.e2e.server import Server


def post(server: Server, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Status and JSON of a text completion."""
    data = json.dumps({"prompt": "The quick brown", "max_tokens": 8, "seed": 3, **body}).encode()
    request = urllib.request.Request(f"{server.url}/v1/completions", data)  # noqa: S310 - our own address
    try:
        with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310 - our own address
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def test_extreme_numbers_leave_a_real_engine_alive(server: Server) -> None:
    """The answer with a huge top_k is that of the whole vocabulary, what is larger is a 400, and no engine dies."""
    engine_pid = server.engine_pid()
    filters: list[dict[str, Any]] = [
        {},
        {"top_p": 0.9},
        {"min_p": 0.05},
        {"speculation": "ngram"},
        {"temperature": 1e-300},
    ]
    for others in filters:
        _, expected = post(server, {"top_k": 49152, **others})
        for top_k in (49153, 2**31, 2**61 - 1, 2**61, 2**62, 2**63 - 1):
            status, body = post(server, {"top_k": top_k, **others})
            assert (status, body.get("choices")) == (200, expected["choices"]), (top_k, others)
    refused: list[dict[str, Any]] = [
        *({"top_k": top_k} for top_k in (2**63, 2**64, 2**70, -2)),
        {"logit_bias": {"49152": 1}},
        {"logit_bias": {"0" * 5000: 1}},
        {"stop_token_ids": [49152]},
        {"stop_token_ids": [2**63]},
        {"prompt": [49152]},
        {"logprobs": 2**63},
        {"min_tokens": 2**63},
        {"max_tokens": 2**64},
        {"n": 2**63},
        {"repetition_penalty": 1e-300},
    ]
    for wrong in refused:
        assert post(server, wrong)[0] == 400, wrong
    edges: list[dict[str, Any]] = [
        {"repetition_penalty": 0.001, "temperature": 1.1e-5},
        {"top_p": 5e-324},
        {"min_p": 5e-324},
    ]
    biases: list[dict[str, Any]] = [{}, {"logit_bias": {"5": 100, "6": -100}}, {"top_k": 2**61}]
    for edge in edges:
        for others in biases:
            assert post(server, {**others, **edge})[0] == 200, (edge, others)
    assert server.engine_pid() == engine_pid
    server.wait_until_idle()
