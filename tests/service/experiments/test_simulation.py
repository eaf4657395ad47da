"""The fast, seeded version of `python -m benchmarks.experiment_simulation`."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.experiment_simulation import SCENARIOS, Scenario, looks, main, median, run, share
from service.experiments.statistics import ratio


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_looking_often_seldom_cries_wolf(scenario: Scenario) -> None:
    """In 80 A/A runs with 50 looks each, at most 5 % ever find a difference, adjusted or not."""
    found = run(scenario, runs=80, samples=500, effect=0.0, seed=1, every=10)
    assert share([one.unadjusted for one in found]) <= 0.05
    assert share([one.adjusted for one in found]) <= 0.05


SMALL_ARMS = [scenario for scenario in SCENARIOS if scenario.name in {"requests, 10/90", "requests, 5/95"}]


@pytest.mark.parametrize("scenario", SMALL_ARMS, ids=lambda scenario: scenario.name)
def test_a_small_arm_seldom_cries_wolf(scenario: Scenario) -> None:
    """In 300 A/A runs of 1,000 requests at most 3 % find a difference, where known slopes would make it over 5 %."""
    found = run(scenario, runs=300, samples=1000, effect=0.0, seed=0, every=10)
    assert share([one.unadjusted for one in found]) <= 0.03
    assert share([one.adjusted for one in found]) <= 0.03


def test_an_outage_is_not_taken_for_a_difference() -> None:
    """In 200 A/A runs at 5/95 at most 3 % blame an arm for 50 slow requests, of which the small arm may get none."""
    (scenario,) = (one for one in SCENARIOS if one.name == "outage of 50 requests, 5/95")
    found = run(scenario, runs=200, samples=2000, effect=0.0, seed=0, every=10)
    assert share([one.unadjusted for one in found]) <= 0.03
    assert share([one.adjusted for one in found]) <= 0.03


def test_a_t_test_at_every_look_would_cry_wolf() -> None:
    """The same traffic under the usual test, looked at as often, raises false alarms in over a fifth of the runs."""
    found = run(SCENARIOS[0], runs=80, samples=500, effect=0.0, seed=1)
    assert share([one.peeking for one in found]) > 0.2


def test_covariates_save_samples() -> None:
    """A difference of 10 % is found in nearly every run, with a third fewer samples when adjusted."""
    found = run(SCENARIOS[0], runs=40, samples=2000, effect=-math.log(1.1), seed=2)
    assert share([one.adjusted for one in found]) > 0.9
    plain, fitted = (median(firsts, 2000) for firsts in ([f.unadjusted for f in found], [f.adjusted for f in found]))
    assert fitted < 0.7 * plain


def test_looks_are_the_moments_of_what_came_before() -> None:
    """Running moments with clusters equal those computed from the clusters' sums at that time."""
    traffic = SCENARIOS[4].draw(np.random.default_rng(3), 200, 0.0)
    running = looks(traffic)
    assert traffic.cluster is not None
    sums = np.zeros((traffic.cluster.max() + 1, 2, len(ratio.FIELDS)))
    np.add.at(sums, (traffic.cluster[:150], traffic.arm[:150]), traffic.fields[:150])
    assert np.allclose(running.sums[149], sums.sum(0))
    assert np.allclose(running.second[149], np.einsum("cif,cjg->ifjg", sums, sums))
    seldom = looks(traffic, every=30)
    assert np.allclose(seldom.sums, running.sums[29::30])
    assert np.allclose(seldom.second, running.second[29::30])


def test_the_command_prints_its_tables(capsys: pytest.CaptureFixture[str]) -> None:
    """Both tables come out as markdown."""
    assert main(["--runs", "2", "--samples", "60"]) == 0
    printed = capsys.readouterr().out
    assert [line.split(" | ")[0] for line in printed.splitlines() if "samples" in line or "A/A" in line][1:] == [
        "| A/A",
        "| A/B",
    ]
    assert printed.count("switchback slots") == 4
