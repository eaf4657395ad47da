from __future__ import annotations

from functools import reduce
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.experiments.assignment import NUM_BUCKETS, Place
from service.experiments.model import Metric
from service.experiments.sheet import Sheet
from service.experiments.statistics import ratio
from service.experiments.statistics.quantile import NUM_BINS, NUM_GROUPS
from service.experiments.statistics.units import MAX_UNITS
from service.experiments.tally import Outcome, Request, Tally, metric_terms, record
from tests.service.experiments.traffic import Law, definition, experiment, observe

KINDS: list[dict[str, Any]] = [
    {},
    {"unit": "user"},
    {"allocation": "adaptive"},
    {"allocation": "switchback"},
    {"guardrails": [{"metric": "ttft", "max_worsening": 0.1}, {"metric": "error_rate", "limit": 0.1}]},
]


def close(one: Tally, other: Tally) -> bool:
    same = one.units == other.units and one.sums.keys() == other.sums.keys()
    return same and all(one.sums[name] == pytest.approx(other.sums[name]) for name in one.sums)


@pytest.mark.parametrize("kind", KINDS)
@given(cuts=st.lists(st.integers(0, 120), min_size=2, max_size=2))
def test_fronts_merge_to_what_one_would_have_seen(kind: dict[str, Any], cuts: list[int]) -> None:
    """However requests are split over three fronts, and in whatever order these merge, the sum is the same."""
    chosen, law = experiment(**kind), Law(1)
    low, high = sorted(cuts)
    parts = [observe(chosen, law, n, first=first) for first, n in ((0, low), (low, high - low), (high, 120 - high))]
    whole = observe(chosen, Law(1), 120)
    a, b, c = parts
    assert close(a.merged(b).merged(c), whole)
    assert close(c.merged(a.merged(b)), whole)
    assert close(b.merged(c).merged(a), reduce(Tally.merged, parts, Tally()))


def test_moments_are_those_of_the_requests() -> None:
    """What is read back from the tally equals first and second moments of the requests themselves."""
    chosen = definition(metric="latency_per_token")
    tally, rows = Tally(), []
    rng = np.random.default_rng(1)
    for number in range(50):
        tokens, prompt, load, seconds = (
            int(rng.integers(1, 90)),
            int(rng.integers(1, 900)),
            float(number % 7),
            rng.random(),
        )
        place = Place(0, 0.5, number, number, is_counted=True)
        outcome = Outcome(status="finished", num_output_tokens=tokens, ttft_seconds=0.1, latency_seconds=seconds)
        record(tally, chosen, Request(place, [0.5, 0.5], prompt, load), outcome)
        rows.append([1.0, seconds, tokens, prompt, tokens, load, load * tokens])
    array = np.array(rows)
    moments = Sheet(tally, chosen).moments()
    assert np.allclose(moments.sums[0], array.sum(0))
    assert np.allclose(moments.second[0, :, 0, :], array.T @ array)
    assert not moments.sums[1].any()


@pytest.mark.parametrize(
    ("metric", "terms"),
    [
        ("tpot", (1.5, 9.0)),
        ("latency_per_token", (2.0, 10.0)),
        ("ttft", (0.5, 1.0)),
        ("tokens_per_second", (2.0, 10.0)),
    ],
)
def test_each_metric_is_time_over_something(metric: Metric, terms: tuple[float, float]) -> None:
    """A request of 10 tokens, the first after 0.5 s, the last after 2 s."""
    outcome = Outcome(status="finished", num_output_tokens=10, ttft_seconds=0.5, latency_seconds=2.0)
    assert metric_terms(metric, outcome) == terms
    assert metric_terms(metric, msgspec.structs.replace(outcome, num_output_tokens=0)) is None


def test_one_token_has_no_time_between_tokens() -> None:
    """A request with a single token is counted, and left out of TPOT."""
    chosen, tally = definition(), Tally()
    request = Request(Place(1, 0.5, 3, 4, is_counted=True), [0.5, 0.5], 10, 0.0)
    record(
        tally, chosen, request, Outcome(status="finished", num_output_tokens=1, ttft_seconds=1.0, latency_seconds=1.0)
    )
    assert (tally.count(1, "finished"), tally.count(1, "analysed")) == (1.0, 0.0)


def test_failures_and_departures_are_kept_apart() -> None:
    """A failed request counts against the arm, one whose client left does not; neither has a time."""
    chosen, tally = definition(), Tally()
    request = Request(Place(1, 0.5, 3, 4, is_counted=True), [0.5, 0.5], 10, 0.0)
    for status in ("finished", "failed", "aborted"):
        record(tally, chosen, request, Outcome(status=status, num_output_tokens=5, latency_seconds=1.0))
    sheet = Sheet(tally, chosen)
    assert (sheet.failed.sum(), sheet.served.sum()) == (1.0, 2.0)
    assert [tally.count(1, what) for what in ("finished", "failed", "aborted", "analysed")] == [1, 1, 1, 1]


def test_washout_requests_are_counted_and_not_analysed() -> None:
    """What arrives right after a switch appears among the finished alone."""
    chosen, tally = definition(), Tally()
    request = Request(Place(1, 0.5, 3, 4, is_counted=False), [0.5, 0.5], 10, 0.0)
    record(tally, chosen, request, Outcome(status="finished", num_output_tokens=5, latency_seconds=1.0))
    assert tally.sums == {"n.1.finished": 1.0}


def test_ten_thousand_header_values_stay_bounded() -> None:
    """20,000 requests of 10,000 users need no more than buckets, bins and counts, and a fixed sample of units."""
    chosen = experiment(unit="header:X-User")
    tally = observe(chosen, Law(2, num_users=10_000), 20_000)
    buckets = NUM_BUCKETS * 2 * len(ratio.FIELDS)
    assert sum(name.startswith("b.") for name in tally.sums) <= buckets
    assert len(tally.sums) <= buckets + 2 * NUM_GROUPS * NUM_BINS
    assert len(tally.units) < 2 * MAX_UNITS
    small = observe(chosen, Law(2, num_users=10_000), 10_000)
    assert len(msgspec.msgpack.encode(tally)) < 1.2 * len(msgspec.msgpack.encode(small))


def test_a_tally_survives_the_wire() -> None:
    """MessagePack and back leaves sums and units as they were."""
    tally = observe(experiment(unit="user"), Law(3), 100)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(tally), type=Tally) == tally


def test_adaptive_requests_weigh_what_their_arm_was_denied() -> None:
    """With shares of 0.1 and 0.9 both arms' weighted counts estimate all requests."""
    chosen = msgspec.structs.replace(experiment(allocation="adaptive"), weights=[0.1, 0.9])
    tally = observe(chosen, Law(4), 4000)
    assert Sheet(tally, chosen.definition).moments().sums[:, ratio.COUNT] == pytest.approx([4000, 4000], rel=0.15)
    assert Sheet(tally, chosen.definition).bins("tpot").sum((1, 2)) == pytest.approx([4000, 4000], rel=0.15)
    assert tally.sums["x.0"] == pytest.approx(400)
