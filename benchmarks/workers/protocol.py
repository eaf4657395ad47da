"""The worker's side of the JSON lines; the other side is `benchmarks.worker_system`. Standard library only."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Protocol, TypedDict


class WorkerAsk(TypedDict):
    """One prompt; the fields of `benchmarks.system.Ask` that a worker reads."""

    token_ids: list[int]
    num_tokens: int
    """So many tokens are generated, whatever they are."""
    seed: int


class WorkerAnswer(TypedDict):
    """The fields of `benchmarks.system.Answer` that a worker knows."""

    token_ids: list[int]
    arrivals: list[tuple[float, int]]


class WorkerSystem(Protocol):
    """What a worker module builds."""

    precision: str

    def answer(self, asks: Sequence[WorkerAsk]) -> list[WorkerAnswer]:
        """Answer all at the same time."""


class Clock:
    """Arrivals of each of several answers, in seconds since it was made."""

    def __init__(self, asks: Sequence[WorkerAsk]) -> None:
        self._wanted = [ask["num_tokens"] for ask in asks]
        self._start = time.perf_counter()
        self.token_ids: list[list[int]] = [[] for _ in asks]
        self._arrivals: list[list[tuple[float, int]]] = [[] for _ in asks]

    def note(self, index: int, token_ids: Sequence[int]) -> None:
        """Tokens of answer `index` are there now; those beyond what was wanted do not count."""
        kept = list(token_ids)[: self._wanted[index] - len(self.token_ids[index])]
        if kept:
            self.token_ids[index] += kept
            self._arrivals[index].append((time.perf_counter() - self._start, len(kept)))

    def answers(self) -> list[WorkerAnswer]:
        pairs = zip(self.token_ids, self._arrivals, strict=True)
        return [WorkerAnswer(token_ids=token_ids, arrivals=arrivals) for token_ids, arrivals in pairs]


class LineChannel:
    """Standard output for the protocol alone; what libraries print goes to standard error from here on."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def serve(self, system: WorkerSystem) -> None:
        """Answer until standard input ends."""
        self._write({"precision": system.precision})
        for line in sys.stdin:
            self._write(system.answer(json.loads(line)))

    def _write(self, value: object) -> None:
        self._out.write(json.dumps(value) + "\n")
        self._out.flush()
