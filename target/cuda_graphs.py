"""Steps captured as CUDA graphs, so that a step costs one launch and not hundreds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable

import torch

logger = logging.getLogger(__name__)

Outputs = tuple[torch.Tensor, torch.Tensor | None]
MAX_GRAPHS = 64
"""Kinds of steps that are kept; others run without a graph."""
MAX_GRAPH_ROWS = 256
"""Larger steps hide the cost of their launches."""


class StepGraphs:
    """Runs computations that read and write memory whose addresses stay the same.

    A kind of step is captured the second time it is seen: the first time compiles its kernels and chooses its
    libraries' algorithms, and many kinds are seen once. What `run` returns is overwritten by the next run of the kind.
    Where a capture fails, that is logged once and everything runs without graphs from then on.
    """

    def __init__(self, name: str, *, enabled: bool) -> None:
        """`name`: whose steps they are, for that line."""
        self.enabled = enabled
        self._name = name
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Outputs]] = {}

    def run(self, kind: Hashable, compute: Callable[[], Outputs]) -> Outputs:
        """What `compute` returns. Computations of one kind differ in nothing but what lies in their memory."""
        if not self.enabled:
            return compute()
        found = self._graphs.get(kind)
        if found is None and kind in self._seen and len(self._graphs) < MAX_GRAPHS:
            found = self._capture(kind, compute)
        self._seen.add(kind)
        if found is None:
            return compute()
        graph, outputs = found
        graph.replay()
        return outputs

    def clear(self) -> None:
        """Forget everything that was captured: memory has moved."""
        self._graphs.clear()
        self._seen.clear()

    def _capture(self, kind: Hashable, compute: Callable[[], Outputs]) -> tuple[torch.cuda.CUDAGraph, Outputs] | None:
        graph = torch.cuda.CUDAGraph()
        try:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                outputs = compute()
        except RuntimeError as error:
            self.enabled = False
            self.clear()
            logger.warning("%s run without CUDA graphs: %s", self._name, error)
            return None
        self._graphs[kind] = graph, outputs
        return graph, outputs
