"""Experiments and traffic for tests: definitions, and requests whose times follow a simple law."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import numpy as np

from service.experiments.assignment import RequestFacts, place, traffic_weights
from service.experiments.model import Definition, Experiment
from service.experiments.tally import Outcome, Request, Tally, record
from service.experiments.validation import initial_weights, parse_definition, resolve_arms

PLAIN = {"name": "plain", "speculation": {"method": "none"}}
NGRAM = {"name": "ngram-8", "speculation": {"method": "ngram", "num_speculative_tokens": 8}}
DRAFT = {"name": "draft", "speculation": {"method": "draft_model"}}


def body(**changes: Any) -> dict[str, Any]:
    """A definition as a client writes it."""
    return {"name": "lookup", "arms": [PLAIN, NGRAM], **changes}


def encoded(**changes: Any) -> bytes:
    return json.dumps(body(**changes)).encode()


def definition(**changes: Any) -> Definition:
    return parse_definition(encoded(**changes))


def experiment(*, salt: str = "pepper", **changes: Any) -> Experiment:
    """A running one, started at time 0."""
    chosen = definition(**changes)
    configs, versions = resolve_arms(chosen, {}, lambda _: None)
    return Experiment(
        definition=chosen,
        configs=configs,
        versions=versions,
        salt=salt,
        status="running",
        created_at=0.0,
        started_at=0.0,
        weights=initial_weights(chosen),
    )


def facts(number: int = 0, **changes: Any) -> RequestFacts:
    known: dict[str, Any] = {
        "request_id": f"request-{number}",
        "model": "m",
        "route": "/v1/chat/completions",
        "num_prompt_tokens": 100,
        "arrived_at": float(number),
        "queue_depth": 0.0,
    }
    return RequestFacts(**(known | changes))


class Law:
    """Requests of about 70 tokens that cost 20 ms each and more under load; arm k is `effects[k]` times as slow."""

    def __init__(self, seed: int, effects: tuple[float, ...] = (1.0, 1.0), *, num_users: int = 300) -> None:
        self._rng = np.random.default_rng(seed)
        self._effects = effects
        self._num_users = num_users

    def facts(self, number: int) -> RequestFacts:
        rng = self._rng
        user = f"user-{rng.integers(self._num_users)}"
        return facts(
            number,
            num_prompt_tokens=math.ceil(rng.lognormal(5.0, 0.8)),
            queue_depth=float(rng.poisson(4.0)),
            headers={"x-user": user},
            user=user,
        )

    def outcome(self, known: RequestFacts, arm: int) -> Outcome:
        rng = self._rng
        tokens = math.ceil(rng.lognormal(4.0, 0.7)) + 1
        per_token = (0.02 + 0.003 * known.queue_depth) * rng.lognormal(0.0, 0.3) * self._effects[arm]
        ttft = 0.05 + 0.001 * known.num_prompt_tokens * rng.lognormal(0.0, 0.3)
        latency = ttft + per_token * (tokens - 1)
        return Outcome(status="finished", num_output_tokens=tokens, ttft_seconds=ttft, latency_seconds=latency)


def observe(chosen: Experiment, law: Law, num: int, *, first: int = 0, tally: Tally | None = None) -> Tally:
    """The tally of requests `first` … `first + num - 1`, one a second."""
    tally = tally or Tally()
    for number in range(first, first + num):
        known = law.facts(number)
        found = place(chosen, known)
        assert found is not None
        request = Request(found, traffic_weights(chosen), known.num_prompt_tokens, known.queue_depth)
        record(tally, chosen.definition, request, law.outcome(known, found.arm))
    return tally


def replaced(chosen: Experiment, **changes: Any) -> Experiment:
    return msgspec.structs.replace(chosen, **changes)
