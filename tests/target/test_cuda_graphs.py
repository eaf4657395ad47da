"""When steps are captured, replayed, and run without a graph; with a stand-in for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from target import cuda_graphs
from target.cuda_graphs import Outputs, StepGraphs


class Step:
    """Counts what is computed and what is replayed."""

    def __init__(self) -> None:
        self.computed = 0
        self.outputs: Outputs = (torch.zeros(1), None)

    def compute(self) -> Outputs:
        self.computed += 1
        return self.outputs


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done to graphs; they capture whatever they are given."""
    done: list[str] = []

    class Graph:
        def replay(self) -> None:
            done.append("replay")

    @contextmanager
    def capture(graph: Graph) -> Iterator[None]:
        done.append("capture")
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return done


def test_the_second_step_of_a_kind_is_captured(replays: list[str]) -> None:
    """The first runs as it is, the second is captured and replayed, later ones are replayed."""
    graphs, step = StepGraphs("steps", enabled=True), Step()
    assert all(graphs.run(16, step.compute) is step.outputs for _ in range(4))
    assert (step.computed, replays) == (2, ["capture", "replay", "replay", "replay"])
    graphs.run(32, step.compute)
    assert step.computed == 3


def test_moved_memory_is_captured_again(replays: list[str]) -> None:
    """After `clear` nothing that was captured is replayed."""
    graphs, step = StepGraphs("steps", enabled=True), Step()
    for _ in range(2):
        graphs.run(16, step.compute)
    graphs.clear()
    graphs.run(16, step.compute)
    assert (step.computed, replays) == (3, ["capture", "replay"])


def test_no_more_kinds_are_kept_than_there_is_room_for(replays: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Kinds behind the last that fits run without a graph."""
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 1)
    graphs, step = StepGraphs("steps", enabled=True), Step()
    for kind in (16, 16, 32, 32, 16):
        graphs.run(kind, step.compute)
    assert (step.computed, replays.count("capture")) == (4, 1)


def test_a_failed_capture_is_told_once(
    replays: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a step cannot be captured, one line says so and all steps run without graphs."""

    @contextmanager
    def refuse(graph: object) -> Iterator[None]:
        yield
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", refuse)
    graphs, step = StepGraphs("steps", enabled=True), Step()
    for kind in (16, 16, 16, 32, 32):
        assert graphs.run(kind, step.compute) is step.outputs
    assert [record.getMessage() for record in caplog.records] == [
        "steps run without CUDA graphs: operation not permitted when stream is capturing"
    ]
    assert replays == []
