"""CUDA graphs without a device: what was captured is computed again, into the results of its first time.

Like a graph it knows its own memory alone. What a step reads from anywhere else is what it was when it was captured.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import pytest

from target.cuda_graphs import Outputs, StepGraphs


class RecordedGraph:
    """One captured step."""

    def __init__(self, compute: Callable[[], Outputs]) -> None:
        self._compute = compute
        self.outputs = compute()
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        for kept, new in zip(self.outputs, self._compute(), strict=True):
            if kept is not None and new is not None:
                kept.copy_(new)


def record_graphs(monkeypatch: pytest.MonkeyPatch) -> dict[Hashable, RecordedGraph]:
    """From now on steps are recorded where they would be captured; gives the recordings by kind."""
    recorded: dict[Hashable, RecordedGraph] = {}

    def capture(self: Any, kind: Hashable, compute: Callable[[], Outputs]) -> tuple[RecordedGraph, Outputs]:
        graph = recorded[kind] = RecordedGraph(compute)
        self._graphs[kind] = graph, graph.outputs
        return graph, graph.outputs

    monkeypatch.setattr(StepGraphs, "_capture", capture)
    return recorded
