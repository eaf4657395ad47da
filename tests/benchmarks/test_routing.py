"""The routing benchmark asks what it says it asks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest

from benchmarks.routing import RoutingReport, Workload, main, prompts


def test_groups_share_their_beginning_and_nothing_else() -> None:
    """200 prompts, of which each of eight groups begins with the same 500 tokens and no two are equal."""
    asked = prompts(Workload())
    begins = Counter(tuple(prompt[:500]) for prompt in asked)
    assert (len(asked), len(begins), set(begins.values())) == (200, 8, {25})
    assert len({tuple(prompt) for prompt in asked}) == 200
    assert prompts(Workload()) == asked
    assert prompts(Workload(seed=1)) != asked


@pytest.mark.slow
def test_routing_by_prefix_finds_more(tmp_path: Path) -> None:
    """On real engines, least predicted time to the first token finds at least half as much again as round robin."""
    path = tmp_path / "report.json"
    assert main(["--json", str(path), "--requests", "48", "--rules", "round_robin", "least_ttft"]) == 0
    report = msgspec.json.decode(path.read_bytes(), type=RoutingReport)
    assert [rule.routing for rule in report.rules] == ["round_robin", "least_ttft"]
    assert report.hit_rate_ratio > 1.5
