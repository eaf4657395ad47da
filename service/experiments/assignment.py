"""Which arm a request gets: a function of experiment and unit alone, so that every front gives the same answer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from service.experiments.model import Definition, Experiment, Filter, Switchback
from service.experiments.statistics.units import HASH_BITS

NUM_BUCKETS = 512
"""Clusters kept for units that come again. Whole units share a bucket, so buckets are as independent as units are, and
the scatter of their sums estimates the same variance; the estimate itself is good to 1/sqrt(2 · 512), 3 %."""


class RequestFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a request before it is sent to an engine."""

    request_id: str
    model: str
    route: str
    """The path, such as /v1/chat/completions."""
    num_prompt_tokens: int
    arrived_at: float
    """Seconds since the epoch."""
    queue_depth: float
    """Requests waiting or running when it arrived."""
    headers: Mapping[str, str] = {}
    """By lower-case name; aiohttp's own mapping will do."""
    user: str | None = None
    has_own_speculation: bool = False
    """The client chose a config: the request stays out of experiments."""


class Place(NamedTuple):
    """Where a request stands in an experiment."""

    arm: int
    probability: float
    """Of being given this arm."""
    bucket: int
    """Cluster that it is counted in, below NUM_BUCKETS."""
    unit: int
    """The unit's hash, below 2**HASH_BITS."""
    is_counted: bool


def matches(chosen: Filter, facts: RequestFacts) -> bool:
    return (
        chosen.model in {None, facts.model}
        and chosen.route in {None, facts.route}
        and (chosen.min_prompt_tokens or 0) <= facts.num_prompt_tokens
        and (chosen.max_prompt_tokens is None or facts.num_prompt_tokens <= chosen.max_prompt_tokens)
        and (chosen.header is None or facts.headers.get(chosen.header.name.lower()) == chosen.header.value)
    )


def unit_of(definition: Definition, facts: RequestFacts) -> str | None:
    """The name of what is assigned, or None for a request without it."""
    if definition.unit == "request":
        return facts.request_id
    if definition.unit == "user":
        return facts.user or None
    return facts.headers.get(definition.unit.partition(":")[2].lower()) or None


def place(experiment: Experiment, facts: RequestFacts) -> Place | None:
    """Where a request that matches the filter stands, or None if it has no unit."""
    definition = experiment.definition
    unit = unit_of(definition, facts)
    if unit is None:
        return None
    of_arm, of_unit = _hashes(experiment.salt, unit)
    allocation = definition.allocation
    if isinstance(allocation, Switchback) and not experiment.is_cooling_down:
        since_start = facts.arrived_at - (experiment.started_at or 0.0)
        slot, into_slot = divmod(max(since_start, 0.0), allocation.slot_seconds)
        block = int(slot) // len(definition.arms)
        arm = slot_arm(experiment.salt, int(slot), len(definition.arms))
        is_counted = into_slot >= allocation.washout_seconds
        return Place(arm, 1.0 / len(definition.arms), block % NUM_BUCKETS, block, is_counted)
    weights = traffic_weights(experiment)
    arm = _arm_at(of_arm / 2.0**64, weights)
    return Place(arm, weights[arm], of_unit % NUM_BUCKETS, of_unit >> (64 - HASH_BITS), is_counted=True)


def traffic_weights(experiment: Experiment) -> list[float]:
    """Each arm's share of new requests: in a cool-down all to the promoted arm but what the first keeps."""
    promotion = experiment.promotion
    if not experiment.is_cooling_down or promotion is None:
        return experiment.weights
    weights = [0.0] * len(experiment.weights)
    weights[0] = promotion.holdback
    weights[promotion.arm] += 1.0 - promotion.holdback
    return weights


def slot_arm(salt: str, slot: int, num_arms: int) -> int:
    """The arm of a time slot: every block of `num_arms` slots is a random permutation of the arms."""
    block, position = divmod(slot, num_arms)
    order = sorted(range(num_arms), key=lambda arm: _hashes(salt, f"block {block} arm {arm}"))
    return order[position]


def _arm_at(point: float, weights: list[float]) -> int:
    """The arm whose stretch of [0, 1) holds the point."""
    for arm, weight in enumerate(weights):
        point -= weight
        if point < 0.0:
            return arm
    return max(arm for arm, weight in enumerate(weights) if weight > 0.0)


def _hashes(salt: str, unit: str) -> tuple[int, int]:
    """Two independent 64-bit numbers for a unit: one chooses the arm, the other the cluster."""
    digest = hashlib.blake2b(unit.encode("utf-8", "surrogatepass"), digest_size=16, key=salt.encode()).digest()
    return int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big")
