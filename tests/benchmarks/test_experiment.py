"""What benchmarks/experiment.py works out from the requests it saw."""

from __future__ import annotations

import random

import pytest

from benchmarks.experiment import COMPARED, Seen, finding_of
from service.experiments.model import Arm, Definition, Metric
from speculation.messages import NoSpeculation

ARMS = [Arm(name=name, speculation=NoSpeculation()) for name in "ab"]


def seen(number: int, factor: float = 1.0, *, most_load: int = 7) -> list[Seen]:
    """Requests whose time depends on lengths and load, and is `factor` times as long a token in arm b."""
    draw = random.Random(2)
    found = []
    for _ in range(number):
        arm, load = draw.choice("ab"), draw.randint(0, most_load)
        prompt_tokens, tokens = draw.randrange(20, 400), draw.randrange(2, 60)
        a_token = (0.01 + 0.005 * load) * (factor if arm == "b" else 1.0) * draw.uniform(0.95, 1.05)
        ttft = (0.001 * prompt_tokens + 0.01 * load) * draw.uniform(0.95, 1.05)
        found.append(
            Seen(
                arm=arm,
                num_prompt_tokens=prompt_tokens,
                queue_depth=load,
                num_output_tokens=tokens,
                ttft=ttft,
                end_to_end=ttft + (tokens - 1) * a_token,
            )
        )
    return found


def saved(metric: Metric, requests: list[Seen]) -> float:
    share = finding_of(Definition(name="x", arms=ARMS, metric=metric), requests).samples_saved
    assert share is not None
    return share


@pytest.mark.parametrize("factor", [0.7, 1.4])
def test_covariates_find_a_difference_sooner(factor: float) -> None:
    """Faster or slower, an arm is told apart after fewer requests when the queue is taken into account."""
    found = finding_of(Definition(name="x", arms=ARMS), seen(1000, factor))
    assert found.samples_needed is not None
    assert found.samples_needed_unadjusted is not None
    assert found.samples_needed < found.samples_needed_unadjusted
    assert found.samples_saved is not None
    assert found.samples_saved > 0.5
    assert found.adjusted.speedup == pytest.approx(1.0 / factor - 1.0, abs=0.05)


def test_what_covariates_save_depends_on_the_metric() -> None:
    """While the load stands still lengths tell of the first token and of its share in each, not of time per token."""
    requests = seen(300, most_load=0)
    assert abs(saved("tpot", requests)) < 0.1
    assert saved("ttft", requests) > 0.8
    assert saved("latency_per_token", requests) > 0.8
    assert saved("tpot", seen(300)) > 0.5


def test_nothing_is_found_where_there_is_nothing() -> None:
    """Arms that are alike are never told apart, in no metric."""
    for metric in COMPARED:
        found = finding_of(Definition(name="x", arms=ARMS, metric=metric), seen(400))
        assert (found.samples_needed, found.samples_needed_unadjusted) == (None, None)
