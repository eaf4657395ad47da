"""What a client must have left behind when its example has run: each raises AssertionError where that is missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

Check = Callable[[Path, str], None]
"""Looks at the folder in which an example ran, and at its standard output."""


def has_printed(folder: Path, output: str) -> None:
    assert output.strip(), "nothing was printed"


def has_evaluated(folder: Path, output: str) -> None:
    """lm-eval answered all four questions of the task, each rightly."""
    (report,) = folder.glob("results/*/results_*.json")
    results = json.loads(report.read_text())
    assert results["n-samples"]["first_contact"] == {"original": 4, "effective": 4}
    assert results["results"]["first_contact"]["acc,none"] == 1.0, results["results"]


def has_profiled(folder: Path, output: str) -> None:
    """AIPerf's six requests went through, with acceptance from the answers and totals from /metrics."""
    report = json.loads((folder / "results/profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == 6, report["request_count"]
    assert not report["error_summary"], report["error_summary"]
    assert report["spec_decode_acceptance_length"]["avg"] >= 1
    scraped = json.loads((folder / "results/server_metrics_export.json").read_text())["metrics"]
    assert "vllm:spec_decode_num_draft_tokens" in scraped


def has_benchmarked(folder: Path, output: str) -> None:
    """GuideLLM's six requests went through, each with its 16 tokens."""
    (benchmark,) = json.loads((folder / "results.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (6, 0), totals
    assert benchmark["metrics"]["output_token_count"]["successful"]["mean"] == 16
