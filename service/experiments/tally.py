"""What has been seen of an experiment: sums by name, and a sample of units. Bounded in size; merging is adding.

Fronts keep the tally of what they have not flushed yet, the store keeps the sum. Names are short, since Redis holds
them as the fields of one hash:

| name             | sum of                                                              | when                     |
| s.arm.i          | field i of `ratio.FIELDS`                                           | units are requests       |
| m.arm.i.j        | products of fields i <= j                                           | units are requests       |
| b.bucket.arm.i   | field i within a bucket of units or a block of time slots           | units are anything else  |
| q.metric.arm.g.b | requests of group g whose metric lies in bin b                      | for guarded metrics      |
| e.arm.g, t.arm.g | failed requests of group g, and all of them                         | always                   |
| n.arm.what       | finished, failed, aborted, analysed, audited, diverged              | always                   |
| c.what           | considered, matched, assigned                                       | always                   |
| x.arm, v.arm     | analysed requests expected in an arm, and the variance of their number | units are requests    |

With adaptive allocation requests weigh the inverse of their arm's share (see `statistics.allocation`), but in n, x, v.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from service.experiments.assignment import NUM_BUCKETS, Place
from service.experiments.model import Adaptive, Definition, Metric
from service.experiments.statistics import ratio
from service.experiments.statistics.quantile import NUM_BINS, NUM_GROUPS, SampleSize, bin_of
from service.experiments.statistics.units import add_unit, merged

Floats = npt.NDArray[np.float64]
NUM_FIELDS = len(ratio.FIELDS)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a request went. Durations in seconds, as the client saw them."""

    status: Literal["finished", "failed", "aborted"]
    """Failed: an error of the service. Aborted: the client left."""
    num_output_tokens: int = 0
    ttft_seconds: float = 0.0
    latency_seconds: float = 0.0


class Request(NamedTuple):
    """What was known of a request when it was assigned."""

    place: Place
    weights: list[float]
    """Shares of all arms then."""
    num_prompt_tokens: int
    queue_depth: float


class Tally(msgspec.Struct, kw_only=True):
    """Sums by name, and the arm of each sampled unit."""

    sums: dict[str, float] = {}
    units: dict[int, int] = {}

    def add(self, name: str, amount: float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + amount

    def merged(self, other: Tally) -> Tally:
        sums = dict(self.sums)
        for name, amount in other.sums.items():
            sums[name] = sums.get(name, 0.0) + amount
        return Tally(sums=sums, units=merged(self.units, other.units))

    def count(self, arm: int, what: str) -> float:
        return self.sums.get(f"n.{arm}.{what}", 0.0)


def metric_terms(metric: Metric, outcome: Outcome) -> tuple[float, float] | None:
    """A finished request's numerator (seconds) and denominator, or None if it has no such metric.

    Every metric is time over something: tokens per second is latency per token, upside down.
    """
    num_tokens = outcome.num_output_tokens
    if metric == "ttft":
        return (outcome.ttft_seconds, 1.0) if num_tokens >= 1 else None
    if metric == "tpot":
        return (outcome.latency_seconds - outcome.ttft_seconds, num_tokens - 1.0) if num_tokens >= 2 else None
    return (outcome.latency_seconds, float(num_tokens)) if num_tokens >= 1 else None


def record(tally: Tally, definition: Definition, request: Request, outcome: Outcome) -> None:
    """Adds one request."""
    place = request.place
    arm = place.arm
    tally.add(f"n.{arm}.{outcome.status}", 1.0)
    if outcome.status == "aborted" or not place.is_counted:
        return
    weight = 1.0 / place.probability if isinstance(definition.allocation, Adaptive) else 1.0
    group = place.bucket % num_groups(definition)
    tally.add(f"t.{arm}.{group}", weight)
    if outcome.status == "failed":
        tally.add(f"e.{arm}.{group}", weight)
        return
    for metric in guarded_metrics(definition):
        terms = metric_terms(metric, outcome)
        if terms is not None:
            tally.add(f"q.{metric}.{arm}.{group}.{bin_of(terms[0] / terms[1])}", weight)
    terms = metric_terms(definition.metric, outcome)
    if terms is not None:
        _record_primary(tally, definition, request, outcome, terms, weight)


def _record_primary(
    tally: Tally, definition: Definition, request: Request, outcome: Outcome, terms: tuple[float, float], weight: float
) -> None:
    place = request.place
    arm = place.arm
    tally.add(f"n.{arm}.analysed", 1.0)
    tokens, load = float(outcome.num_output_tokens), request.queue_depth
    fields = [1.0, *terms, float(request.num_prompt_tokens), tokens, load, load * tokens]
    fields = [weight * field for field in fields]
    if definition.is_clustered:
        if definition.unit != "request":
            add_unit(tally.units, place.unit, arm)
        for i, field in enumerate(fields):
            tally.add(f"b.{place.bucket}.{arm}.{i}", field)
        return
    for i, field in enumerate(fields):
        tally.add(f"s.{arm}.{i}", field)
        for j in range(i, NUM_FIELDS):
            tally.add(f"m.{arm}.{i}.{j}", field * fields[j])
    for other, share in enumerate(request.weights):
        tally.add(f"x.{other}", share)
        tally.add(f"v.{other}", share * (1.0 - share))


def num_groups(definition: Definition) -> int:
    """One where requests are independent and weigh the same; else enough to see how they scatter."""
    return NUM_GROUPS if definition.is_clustered or isinstance(definition.allocation, Adaptive) else 1


def guarded_metrics(definition: Definition) -> list[Metric]:
    """Metrics whose distribution is kept: the primary one, and those with a guardrail."""
    names: list[Metric] = [definition.metric]
    names.extend(guard.metric for guard in definition.guardrails if guard.metric != "error_rate")
    return list(dict.fromkeys(names))


def moments_of(tally: Tally, definition: Definition) -> ratio.Moments:
    """Moments over clusters, with as many arms as the experiment has."""
    num_arms = len(definition.arms)
    if definition.is_clustered:
        clusters = _dense(tally.sums, "b", (NUM_BUCKETS, num_arms, NUM_FIELDS))
        flat = clusters.reshape(NUM_BUCKETS, -1)
        return ratio.Moments(clusters.sum(0), (flat.T @ flat).reshape(num_arms, NUM_FIELDS, num_arms, NUM_FIELDS))
    products = _dense(tally.sums, "m", (num_arms, NUM_FIELDS, NUM_FIELDS))
    products += np.swapaxes(np.triu(products, 1), 1, 2)
    second = np.zeros((num_arms, NUM_FIELDS, num_arms, NUM_FIELDS))
    arms = np.arange(num_arms)
    second[arms, :, arms, :] = products
    return ratio.Moments(_dense(tally.sums, "s", (num_arms, NUM_FIELDS)), second)


def bins_of(tally: Tally, definition: Definition, metric: Metric) -> Floats:
    """(arms, groups, bins)."""
    return _dense(tally.sums, f"q.{metric}", (len(definition.arms), num_groups(definition), NUM_BINS))


def sizes_of(tally: Tally, definition: Definition) -> list[SampleSize]:
    """Of each arm, for what is kept by group."""
    observations = [tally.count(arm, "finished") + tally.count(arm, "failed") for arm in range(len(definition.arms))]
    if not definition.is_clustered:
        return [SampleSize(number, number) for number in observations]
    buckets: list[set[str]] = [set() for _ in observations]
    for name in tally.sums:
        if name.startswith("b."):
            _, bucket, arm, _ = name.split(".")
            buckets[int(arm)].add(bucket)
    return [SampleSize(number, float(len(seen))) for number, seen in zip(observations, buckets, strict=True)]


def errors_of(tally: Tally, definition: Definition) -> tuple[Floats, Floats]:
    """Failed requests and all of them, each (arms, groups)."""
    shape = (len(definition.arms), num_groups(definition))
    return _dense(tally.sums, "e", shape), _dense(tally.sums, "t", shape)


def _dense(sums: Mapping[str, float], prefix: str, shape: tuple[int, ...]) -> Floats:
    """The sums `prefix.i.j…` as an array."""
    array = np.zeros(shape)
    for name, amount in sums.items():
        if name.startswith(f"{prefix}."):
            array[tuple(map(int, name[len(prefix) + 1 :].split(".")))] = amount
    return array
