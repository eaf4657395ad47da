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

from typing import Literal, NamedTuple

import msgspec

from service.experiments.assignment import Place
from service.experiments.model import Adaptive, Definition, Metric
from service.experiments.statistics import ratio
from service.experiments.statistics.quantile import NUM_GROUPS, bin_of
from service.experiments.statistics.units import add_unit, merged

NUM_FIELDS = len(ratio.FIELDS)
MAX_SECONDS = 1e7
"""Over a hundred days: a clock's fault rather than a request's time, and left out, as infinities and NaN are."""


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

    Every metric is time over something: tokens per second is latency per token, upside down. One infinite time would
    spoil the sums for good.
    """
    num_tokens = outcome.num_output_tokens
    if not (abs(outcome.ttft_seconds) <= MAX_SECONDS and abs(outcome.latency_seconds) <= MAX_SECONDS):
        return None
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
