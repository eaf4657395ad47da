"""How often experiments cry wolf, and how soon they see one: simulated traffic through the service's own statistics.

    python -m benchmarks.experiment_simulation [--runs 2000] [--samples 2000] [--every 10] [--seed 0] [--json OUT]

Prints the tables of docs/experiments.md. In an A/A run arms are the same and every finding is false; there is a look
after every `--every` samples. Times are log-normal around what a token costs at the load a request meets; lengths are
log-normal. Scenarios add what goes wrong in practice: unequal splits, heavy tails, an outage, a drift.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from service.experiments.statistics import ratio
from service.experiments.statistics.allocation import thompson_weights
from service.experiments.statistics.quantile import NUM_BINS, SampleSize, bin_of, quantile
from service.experiments.statistics.sequence import half_width

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

ALPHA = 0.05
SCALE = math.log(1.1)
NUM_FIELDS = len(ratio.FIELDS)
FIRST_PEEK = 100
"""Nobody believes a t-test of fewer requests."""


class Traffic(NamedTuple):
    """Requests in order. fields: (requests, fields) as `ratio.FIELDS`; arm and cluster: (requests,)."""

    fields: Floats
    arm: Ints
    cluster: Ints | None
    """None where every request is a cluster of its own."""
    num_arms: int = 2


class Finding(NamedTuple):
    """The first look at which some pair of arms differed, for both estimates; None where none did."""

    unadjusted: int | None
    adjusted: int | None
    peeking: int | None
    """What a t-test at every look from `FIRST_PEEK` on would have found."""


Times = Callable[[np.random.Generator, int], Floats]
"""Factors of the times of that many requests, in order, whatever their arm."""
Draw = Callable[[np.random.Generator, int, float], Traffic]


class Scenario(NamedTuple):
    """A kind of traffic."""

    name: str
    draw: Draw
    is_switchback: bool = False


def requests(rng: np.random.Generator, num: int, noise: float) -> Floats:
    """Requests whose time is linear in prompt and output, and in output times load, up to log-normal noise."""
    prompt = np.ceil(rng.lognormal(5.5, 0.8, num))
    output = np.ceil(rng.lognormal(4.0, 0.8, num)) + 1.0
    load = rng.poisson(6.0, num).astype(float)
    seconds = output * (0.02 + 0.004 * load) * rng.lognormal(0.0, noise, num) + 0.001 * prompt
    return np.stack([np.ones(num), seconds, output, prompt, output, load, load * output], axis=1)


def pareto(index: float) -> Times:
    """Factors with mean 1 and a tail that falls with the power `index`: below 2 their variance is infinite."""

    def factors(rng: np.random.Generator, num: int) -> Floats:
        return np.asarray((1.0 + rng.pareto(index, num)) * (index - 1.0) / index)

    return factors


def outage(rng: np.random.Generator, num: int) -> Floats:
    """An outage at a random time, in which 50 requests in a row take ten times as long."""
    factors = np.ones(num)
    begin = rng.integers(0, max(num - 50, 1))
    factors[begin : begin + 50] = 10.0
    return factors


def drift(begin: float, end: float) -> Times:
    """A service that becomes slower or faster all the time."""

    def factors(_: np.random.Generator, num: int) -> Floats:
        return np.geomspace(begin, end, num)

    return factors


STEADY = drift(1.0, 1.0)
"""Nothing but the noise that every request has."""


def by_request(shares: tuple[float, ...], noise: float = 0.3, times: Times = STEADY) -> Draw:
    """Requests that fall to arms by these shares of the traffic."""

    def draw(rng: np.random.Generator, num: int, effect: float) -> Traffic:
        fields, arm = requests(rng, num, noise), rng.choice(len(shares), num, p=shares)
        fields[:, ratio.TIME] *= times(rng, num) * np.where(arm == 1, math.exp(effect), 1.0)
        return Traffic(fields, arm, None, len(shares))

    return draw


def by_user(shares: tuple[float, float]) -> Draw:
    """300 users, each with a speed of their own; some are a hundred times as busy as others."""

    def draw(rng: np.random.Generator, num: int, effect: float) -> Traffic:
        activity = rng.pareto(1.5, 300) + 0.1
        user = rng.choice(300, num, p=activity / activity.sum())
        arms, speed = rng.choice(2, 300, p=shares), rng.lognormal(0.0, 0.3, 300)
        fields, arm = requests(rng, num, 0.3), arms[user]
        fields[:, ratio.TIME] *= speed[user] * np.where(arm == 1, math.exp(effect), 1.0)
        return Traffic(fields, arm, user)

    return draw


def by_slot(rng: np.random.Generator, num: int, effect: float) -> Traffic:
    """Slots of 20 requests in blocks of two; all requests of a slot share its luck, and the day has its tides."""
    slot = np.arange(num) // 20
    first = rng.integers(0, 2, num)[slot // 2]
    arm = (first + slot) % 2
    tide = 0.3 * np.sin(np.arange(num) * 2.0 * math.pi / 700.0) + rng.normal(0.0, 0.1, num)[slot]
    fields = requests(rng, num, 0.3)
    fields[:, ratio.TIME] *= np.exp(tide + np.where(arm == 1, effect, 0.0))
    return Traffic(fields, arm, slot // 2)


def adaptive(rng: np.random.Generator, num: int, effect: float) -> Traffic:
    """Weights move every 100 requests by Thompson sampling, while the service gets slower and faster by itself."""
    fields = requests(rng, num, 0.3)
    fields[:, ratio.TIME] *= np.exp(0.3 * np.sin(np.arange(num) * 2.0 * math.pi / 900.0))
    arm = np.empty(num, dtype=np.int64)
    weights = np.array([0.5, 0.5])
    sums, second = np.zeros((2, NUM_FIELDS)), np.zeros((2, NUM_FIELDS, 2, NUM_FIELDS))
    for begin in range(0, num, 100):
        part = slice(begin, begin + 100)
        arm[part] = rng.random(len(arm[part])) < weights[1]
        fields[part, ratio.TIME] *= np.where(arm[part] == 1, math.exp(effect), 1.0)
        fields[part] /= weights[arm[part], None]
        for k in (0, 1):
            own = fields[part][arm[part] == k]
            sums[k] += own.sum(0)
            second[k, :, k, :] += own.T @ own
        if begin >= 100:
            levels = ratio.unadjusted(ratio.Moments(sums, second))
            errors = np.sqrt(np.diagonal(levels.covariance))
            weights = np.array(thompson_weights(levels.log_ratio, errors, floor=0.1))
    return Traffic(fields, arm, None)


EVEN, TENTH, TWENTIETH = (0.5, 0.5), (0.9, 0.1), (0.95, 0.05)
SPLITS = (("", EVEN), (", 10/90", TENTH), (", 5/95", TWENTIETH))
TROUBLES: tuple[tuple[str, Times], ...] = (
    ("Pareto tail 2.5", pareto(2.5)),
    ("Pareto tail 1.8", pareto(1.8)),
    ("outage of 50 requests", outage),
    ("drift to 5 times", drift(1.0, 5.0)),
)
SCENARIOS = (
    Scenario("requests, 30 % noise", by_request(EVEN)),
    Scenario("requests, 2 % noise", by_request(EVEN, 0.02)),
    Scenario("requests, 100 % noise", by_request(EVEN, 1.0)),
    Scenario("three arms, all pairs", by_request((1 / 3, 1 / 3, 1 / 3))),
    Scenario("300 users, unequal", by_user(EVEN)),
    Scenario("switchback slots", by_slot, is_switchback=True),
    Scenario("adaptive weights", adaptive),
    Scenario("requests, 10/90", by_request(TENTH)),
    Scenario("requests, 5/95", by_request(TWENTIETH)),
    Scenario("requests, 2 % noise, 5/95", by_request(TWENTIETH, 0.02)),
    Scenario("three arms, 5/5/90", by_request((0.9, 0.05, 0.05))),
    Scenario("300 users, 10/90", by_user(TENTH)),
    *(
        Scenario(f"{name}{split}", by_request(shares, times=times))
        for name, times in TROUBLES
        for split, shares in SPLITS
    ),
)
POWER = tuple(SCENARIOS[number] for number in (0, 5, 6, 8))
"""What is shown of how soon a difference is found."""


def looks(traffic: Traffic, every: int = 1) -> ratio.Moments:
    """Moments after every `every` requests: (looks, arms, …)."""
    num_looks = len(traffic.arm) // every
    num = num_looks * every
    vectors = np.eye(traffic.num_arms)[traffic.arm[:num]][:, :, None] * traffic.fields[:num, None, :]
    flat = vectors.reshape(num_looks, every, -1)
    added = np.swapaxes(flat, 1, 2) @ flat
    if traffic.cluster is not None:
        before = _earlier_in_cluster(flat.reshape(num, -1), traffic.cluster[:num]).reshape(flat.shape)
        crossed = np.swapaxes(flat, 1, 2) @ before
        added += crossed + np.swapaxes(crossed, 1, 2)
    shape = (num_looks, traffic.num_arms, NUM_FIELDS)
    sums = flat.sum(1).cumsum(0).reshape(shape)
    return ratio.Moments(sums, added.cumsum(0).reshape(*shape, traffic.num_arms, NUM_FIELDS))


def _earlier_in_cluster(flat: Floats, cluster: Ints) -> Floats:
    """For each request the sum of those of its cluster that came before it."""
    order = np.argsort(cluster, kind="stable")
    ordered, sorted_clusters = flat[order], cluster[order]
    running = ordered.cumsum(0) - ordered
    starts = np.flatnonzero(np.r_[True, sorted_clusters[1:] != sorted_clusters[:-1]])
    running -= np.repeat(running[starts], np.diff(np.r_[starts, len(cluster)]), axis=0)
    before = np.empty_like(flat)
    before[order] = running
    return before


def first_findings(traffic: Traffic, *, is_switchback: bool, every: int) -> Finding:
    """Look after every `every` requests, once each arm has had one before."""
    moments = looks(traffic, every)
    has_all: npt.NDArray[np.bool_] = np.all(moments.sums[..., ratio.COUNT] > 0.0, axis=1)
    begin = int(np.argmax(has_all)) + 1
    if begin == len(has_all) or not has_all.any():
        return Finding(None, None, None)
    moments = ratio.Moments(moments.sums[begin:], moments.second[begin:])
    numbers = every * np.arange(begin + 1, len(has_all) + 1)
    covariates = ratio.LENGTHS if is_switchback else ratio.COVARIATES
    with np.errstate(all="ignore"):
        plain = ratio.unadjusted(moments)
        fitted = ratio.adjusted(moments, covariates, is_paired=is_switchback)
        return Finding(_first(plain, always, numbers), _first(fitted, always, numbers), _first(plain, once, numbers))


def always(error: Floats, freedom: Floats, alpha: float) -> Floats:
    """Half the width of our interval."""
    return half_width(error, freedom, alpha=alpha, scale=SCALE)


def once(error: Floats, freedom: Floats, alpha: float) -> Floats:
    """That of a t-test, which is right for one look."""
    return np.asarray(error * -special.stdtrit(np.maximum(freedom, 1.0), alpha / 2.0))


def _first(levels: ratio.Levels, width: Callable[[Floats, Floats, float], Floats], numbers: Ints) -> int | None:
    """The number of requests at which some pair's interval first excluded 0. T-tests begin at FIRST_PEEK.

    numbers: (looks,), requests seen at each look.
    """
    num_arms = levels.log_ratio.shape[-1]
    pairs = [(arm, against) for against in range(num_arms) for arm in range(against + 1, num_arms)]
    is_found = np.zeros(len(levels.log_ratio), dtype=bool)
    for pair in pairs:
        estimate, error, freedom = ratio.difference(levels, *pair)
        is_found |= np.abs(estimate) > width(error, freedom, ALPHA / len(pairs))
    if width is once:
        is_found &= numbers > FIRST_PEEK
    return int(numbers[np.argmax(is_found)]) if is_found.any() else None


def run(scenario: Scenario, *, runs: int, samples: int, effect: float, seed: int, every: int = 1) -> list[Finding]:
    """Independent runs of one scenario."""
    generators = np.random.default_rng(seed).spawn(runs)
    return [
        first_findings(scenario.draw(rng, samples, effect), is_switchback=scenario.is_switchback, every=every)
        for rng in generators
    ]


def quantile_misses(*, runs: int, samples: int, seed: int) -> float:
    """Share of runs in which the interval of a p95 missed it at some look: a look every 10 of `samples` requests."""
    truth = math.exp(0.5 * float(special.ndtri(0.95)))
    misses = 0
    for rng in np.random.default_rng(seed).spawn(runs):
        counts = np.zeros((1, NUM_BINS))
        for number, value in enumerate(rng.lognormal(0.0, 0.5, samples), 1):
            counts[0, bin_of(float(value))] += 1.0
            if number % 10 == 0:
                found = quantile(counts, 0.95, alpha=ALPHA, size=SampleSize(number, number))
                if not found.interval.low <= truth <= found.interval.high:
                    misses += 1
                    break
    return misses / runs


def share(found: list[int | None]) -> float:
    return sum(one is not None for one in found) / len(found)


def median(found: list[int | None], most: int) -> float:
    """Runs that found nothing count as `most`."""
    return float(np.median([most if one is None else one for one in found]))


def false_alarms(runs: int, samples: int, every: int, seed: int) -> Iterator[dict[str, object]]:
    for scenario in SCENARIOS:
        found = run(scenario, runs=runs, samples=samples, effect=0.0, seed=seed, every=every)
        yield {
            "A/A": scenario.name,
            "interval": share([one.unadjusted for one in found]),
            "interval, adjusted": share([one.adjusted for one in found]),
            "t-test at each look from 100": share([one.peeking for one in found]),
        }


def power(runs: int, samples: int, every: int, seed: int) -> Iterator[dict[str, object]]:
    for percent in (5.0, 10.0, 20.0):
        for scenario in POWER:
            effect = -math.log1p(percent / 100.0)
            found = run(scenario, runs=runs, samples=samples, effect=effect, seed=seed, every=every)
            plain = median([one.unadjusted for one in found], samples)
            fitted = median([one.adjusted for one in found], samples)
            yield {
                "A/B": scenario.name,
                "faster by": f"{percent:g} %",
                "samples": plain,
                "samples, adjusted": fitted,
                "saved": f"{100.0 * (1.0 - fitted / plain):.0f} %",
            }


def show(rows: list[dict[str, object]]) -> None:
    """A markdown table."""
    print("| " + " | ".join(rows[0]) + " |\n| " + " | ".join("---" for _ in rows[0]) + " |")
    for row in rows:
        cells = [
            f"{100.0 * cell:.1f} %" if isinstance(cell, float) and cell <= 1.0 else _cell(cell) for cell in row.values()
        ]
        print("| " + " | ".join(cells) + " |")
    print()


def _cell(value: object) -> str:
    return f"{value:,.0f}" if isinstance(value, float) else str(value)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.experiment_simulation", description=__doc__)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--every", type=int, default=10, help="samples from one look to the next")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(arguments)
    print(
        f"{chosen.runs:,} runs of {chosen.samples:,} samples, a look after every {chosen.every}, level {ALPHA}, "
        f"seed {chosen.seed}\n"
    )
    alarms = list(false_alarms(chosen.runs, chosen.samples, chosen.every, chosen.seed))
    missed = quantile_misses(runs=chosen.runs, samples=chosen.samples, seed=chosen.seed)
    alarms.append(
        {
            "A/A": "p95, interval misses it",
            "interval": missed,
            "interval, adjusted": "",
            "t-test at each look from 100": "",
        }
    )
    show(alarms)
    gains = list(power(max(chosen.runs // 10, 1), 4 * chosen.samples, chosen.every, chosen.seed))
    show(gains)
    if chosen.json:
        chosen.json.write_text(json.dumps({"false_alarms": alarms, "power": gains}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
