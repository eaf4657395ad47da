"""Extreme values in every kind of field, in a fixed random order, against the embedded model."""

from __future__ import annotations

import asyncio
import random

import pytest

from benchmarks import fuzz
from benchmarks.fuzz_engine import fuzzed_engine, sampled_messages
from benchmarks.fuzz_requests import socket_messages
from target.embedded import embedded_model_dir
from target.errors import CheckpointError

NUM_REQUESTS = 1200
NUM_SOCKET_MESSAGES = 200
NUM_ENGINE_MESSAGES = 800
SECONDS = 200.0
"""No more is sent then, however slow the machine is."""


@pytest.fixture(autouse=True)
def embedded_model() -> None:
    """Skips where the embedded model was not fetched."""
    try:
        embedded_model_dir()
    except CheckpointError:
        pytest.skip("the embedded model is not fetched; `forerun fetch` fetches it")


async def test_extreme_requests_hurt_nothing() -> None:
    """No request is answered with 500 or not at all, no process dies, nothing is left over, and answers stay right."""
    requests, messages = fuzz.all_requests(), list(socket_messages())
    rng = random.Random(9)
    async with fuzz.running_campaign(fuzz.FLAGS) as (campaign, _):
        deadline = asyncio.get_running_loop().time() + SECONDS
        await campaign.run(rng.sample(requests, NUM_REQUESTS), rng.sample(messages, NUM_SOCKET_MESSAGES), deadline)
    assert campaign.faults == []
    assert campaign.statuses[200] > 0
    assert campaign.statuses[400] > 0


async def test_extreme_messages_hurt_no_engine() -> None:
    """A stand-alone engine refuses what is wrong or closes that connection; it lives on and answers as before."""
    async with fuzzed_engine(fuzz.FLAGS) as engine:
        await engine.check()
        deadline = asyncio.get_running_loop().time() + SECONDS
        for payload, _ in sampled_messages(9)[:NUM_ENGINE_MESSAGES]:
            if asyncio.get_running_loop().time() > deadline:
                break
            await engine.send(payload)
        await engine.check()
    assert engine.outcomes["rejected"] > 0
    assert engine.outcomes["closed"] > 0
