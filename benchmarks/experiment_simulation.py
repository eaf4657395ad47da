"""How often experiments cry wolf, and how soon they see one: simulated traffic through the service's own statistics.

    python -m benchmarks.experiment_simulation [--runs 1000] [--samples 2000] [--seed 0] [--json OUT]

Prints the tables of docs/experiments.md. In an A/A run arms are the same and every finding is false; there is a look
after each sample. Times are log-normal around what a token costs at the load a request meets; lengths are log-normal.
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


class Scenario(NamedTuple):
    """A kind of traffic."""

    name: str
    draw: Callable[[np.random.Generator, int, float], Traffic]
    is_switchback: bool = False


def requests(rng: np.random.Generator, num: int, noise: float) -> Floats:
    """Requests whose time is linear in prompt and output, and in output times load, up to log-normal noise."""
    prompt = np.ceil(rng.lognormal(5.5, 0.8, num))
    output = np.ceil(rng.lognormal(4.0, 0.8, num)) + 1.0
    load = rng.poisson(6.0, num).astype(float)
    seconds = output * (0.02 + 0.004 * load) * rng.lognormal(0.0, noise, num) + 0.001 * prompt
    return np.stack([np.ones(num), seconds, output, prompt, output, load, load * output], axis=1)


def by_request(num_arms: int, noise: float) -> Callable[[np.random.Generator, int, float], Traffic]:
    def draw(rng: np.random.Generator, num: int, effect: float) -> Traffic:
        fields, arm = requests(rng, num, noise), rng.integers(0, num_arms, num)
        fields[arm == 1, ratio.TIME] *= math.exp(effect)
        return Traffic(fields, arm, None, num_arms)

    return draw


def by_user(rng: np.random.Generator, num: int, effect: float) -> Traffic:
    """300 users, each with a speed of their own; some are a hundred times as busy as others."""
    activity = rng.pareto(1.5, 300) + 0.1
    user = rng.choice(300, num, p=activity / activity.sum())
    arms, speed = rng.integers(0, 2, 300), rng.lognormal(0.0, 0.3, 300)
    fields, arm = requests(rng, num, 0.3), arms[user]
    fields[:, ratio.TIME] *= speed[user] * np.where(arm == 1, math.exp(effect), 1.0)
    return Traffic(fields, arm, user)


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


SCENARIOS = (
    Scenario("requests, 30 % noise", by_request(2, 0.3)),
    Scenario("requests, 2 % noise", by_request(2, 0.02)),
    Scenario("requests, 100 % noise", by_request(2, 1.0)),
    Scenario("three arms, all pairs", by_request(3, 0.3)),
    Scenario("300 users, unequal", by_user),
    Scenario("switchback slots", by_slot, is_switchback=True),
    Scenario("adaptive weights", adaptive),
)


def looks(traffic: Traffic) -> ratio.Moments:
    """Moments after each request: (requests, arms, …)."""
    num = len(traffic.arm)
    vectors = np.eye(traffic.num_arms)[traffic.arm][:, :, None] * traffic.fields[:, None, :]
    flat = vectors.reshape(num, -1)
    added = _outer(flat)
    if traffic.cluster is not None:
        before = _earlier_in_cluster(flat, traffic.cluster)
        added = _outer(before + flat) - _outer(before)
    shape = (num, traffic.num_arms, NUM_FIELDS, traffic.num_arms, NUM_FIELDS)
    return ratio.Moments(vectors.cumsum(0), added.cumsum(0).reshape(shape))


def _outer(flat: Floats) -> Floats:
    return flat[:, :, None] * flat[:, None, :]


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


def first_findings(traffic: Traffic, *, is_switchback: bool) -> Finding:
    """Look after each request from the second of every arm on."""
    moments = looks(traffic)
    begin = int(np.argmax((moments.sums[..., ratio.COUNT] > 0.0).all(1))) + 1
    moments = ratio.Moments(moments.sums[begin:], moments.second[begin:])
    covariates = ratio.LENGTHS if is_switchback else ratio.COVARIATES
    with np.errstate(all="ignore"):
        plain = ratio.unadjusted(moments)
        fitted = ratio.adjusted(moments, covariates, is_paired=is_switchback)
        return Finding(_first(plain, always, begin), _first(fitted, always, begin), _first(plain, once, begin))


def always(error: Floats, freedom: Floats, alpha: float) -> Floats:
    """Half the width of our interval."""
    return half_width(error, freedom, alpha=alpha, scale=SCALE)


def once(error: Floats, freedom: Floats, alpha: float) -> Floats:
    """That of a t-test, which is right for one look."""
    return np.asarray(error * -special.stdtrit(np.maximum(freedom, 1.0), alpha / 2.0))


def _first(levels: ratio.Levels, width: Callable[[Floats, Floats, float], Floats], begin: int) -> int | None:
    """The number of requests at which some pair's interval first excluded 0. T-tests begin at FIRST_PEEK."""
    num_arms = levels.log_ratio.shape[-1]
    pairs = [(arm, against) for against in range(num_arms) for arm in range(against + 1, num_arms)]
    is_found = np.zeros(len(levels.log_ratio), dtype=bool)
    for pair in pairs:
        estimate, error, freedom = ratio.difference(levels, *pair)
        is_found |= np.abs(estimate) > width(error, freedom, ALPHA / len(pairs))
    if width is once:
        is_found[: max(FIRST_PEEK - begin, 0)] = False
    return int(np.argmax(is_found)) + begin + 1 if is_found.any() else None


def run(scenario: Scenario, *, runs: int, samples: int, effect: float, seed: int) -> list[Finding]:
    """Independent runs of one scenario."""
    generators = np.random.default_rng(seed).spawn(runs)
    return [
        first_findings(scenario.draw(rng, samples, effect), is_switchback=scenario.is_switchback) for rng in generators
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


def false_alarms(runs: int, samples: int, seed: int) -> Iterator[dict[str, object]]:
    for scenario in SCENARIOS:
        found = run(scenario, runs=runs, samples=samples, effect=0.0, seed=seed)
        yield {
            "A/A": scenario.name,
            "interval": share([one.unadjusted for one in found]),
            "interval, adjusted": share([one.adjusted for one in found]),
            "t-test at each look from 100": share([one.peeking for one in found]),
        }


def power(runs: int, samples: int, seed: int) -> Iterator[dict[str, object]]:
    for percent in (5.0, 10.0, 20.0):
        for scenario in (SCENARIOS[0], *SCENARIOS[5:]):
            effect = -math.log1p(percent / 100.0)
            found = run(scenario, runs=runs, samples=samples, effect=effect, seed=seed)
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
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(arguments)
    print(f"{chosen.runs:,} runs of {chosen.samples:,} samples, a look after each, level {ALPHA}, seed {chosen.seed}\n")
    alarms = list(false_alarms(chosen.runs, chosen.samples, chosen.seed))
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
    gains = list(power(max(chosen.runs // 10, 1), 4 * chosen.samples, chosen.seed))
    show(gains)
    if chosen.json:
        chosen.json.write_text(json.dumps({"false_alarms": alarms, "power": gains}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
