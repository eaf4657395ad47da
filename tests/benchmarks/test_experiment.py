"""What benchmarks/experiment.py works out from the requests it saw."""

from __future__ import annotations

import random

import pytest

from benchmarks.experiment import Seen, first_findings
from service.experiments.model import Arm, Definition
from speculation.messages import NoSpeculation

ARMS = [Arm(name=name, speculation=NoSpeculation()) for name in "ab"]


def seen(number: int, factor: float) -> list[Seen]:
    """Requests whose time depends on the queue, and is `factor` times as long in arm b."""
    draw = random.Random(1)
    found = []
    for _ in range(number):
        arm, depth, tokens = draw.choice("ab"), draw.randrange(8), draw.randrange(2, 60)
        a_token = (0.01 + 0.005 * depth) * (factor if arm == "b" else 1.0) * draw.uniform(0.95, 1.05)
        found.append(
            Seen(
                arm=arm,
                num_prompt_tokens=50,
                queue_depth=depth,
                num_output_tokens=tokens,
                ttft=0.1,
                end_to_end=0.1 + (tokens - 1) * a_token,
            )
        )
    return found


@pytest.mark.parametrize("factor", [0.7, 1.4])
def test_covariates_find_a_difference_sooner(factor: float) -> None:
    """Faster or slower, an arm is told apart after fewer requests when the queue is taken into account."""
    first = first_findings(Definition(name="x", arms=ARMS), seen(1000, factor))
    assert first.adjusted is not None
    assert first.unadjusted is not None
    assert first.adjusted < first.unadjusted


def test_nothing_is_found_where_there_is_nothing() -> None:
    """Arms that are alike are never told apart."""
    assert first_findings(Definition(name="x", arms=ARMS), seen(400, 1.0)) == (None, None)
