"""A benchmark that is terminated leaves nothing running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import termination
from benchmarks.idle import descendants
from benchmarks.random_model import write_random_model

PATIENCE_SECONDS = 120.0


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_terminated_benchmark_stops_its_service(tmp_path: Path) -> None:
    """On SIGTERM, in the middle of its start, routing ends its front and the engines, writes no report and says how."""
    model = write_random_model(tmp_path / "model", hidden_size=64, num_layers=1)
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "benchmarks.routing", "--json", str(report), "--model", str(model)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(started := list(descendants(process.pid))) < 4:  # a front and three engines
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == termination.EXIT_STATUS
    try:
        while any(runs(pid) for pid in started):
            assert time.monotonic() < deadline + PATIENCE_SECONDS
            time.sleep(0.05)
    finally:
        for pid in filter(runs, started):
            os.kill(pid, signal.SIGKILL)
    assert not report.exists()


def test_what_is_not_terminated_is_as_it_was() -> None:
    """A measurement's result is returned, and its error raised."""

    async def measure(fails: bool) -> int:
        if fails:
            raise ValueError("no")
        return 7

    assert termination.run(measure(False)) == 7
    with pytest.raises(ValueError, match="no"):
        termination.run(measure(True))
