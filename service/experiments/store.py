"""Where profiles and experiments are kept, and what all fronts have seen of them: in this process, or in Redis."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from cache_store.metadata import StoreUnavailable
from service.experiments.tally import Tally


class StoredValueError(StoreUnavailable):
    """The store answers, but what it holds under one name is nothing that this version can read or add to."""


class Snapshot(NamedTuple):
    """All documents at one time. Revisions only grow, and 0 is a store that nothing was ever written to."""

    revision: int
    documents: dict[str, bytes]


class ExperimentStore(Protocol):
    """Small documents that change together, and tallies that only grow. All methods may raise `StoreUnavailable`.

    A value that cannot be read raises `StoredValueError`, which concerns this value alone.
    """

    async def revision(self) -> int: ...

    async def read(self) -> Snapshot: ...

    async def write(self, expected_revision: int, changes: Mapping[str, bytes | None]) -> bool:
        """Change documents (None removes one) all at once, if nothing has changed since `expected_revision`."""
        ...

    async def add(self, key: str, front: str, number: int, tally: Tally) -> None:
        """Add what a front has seen. A front numbers what it sends to a key; a number that came before is not counted
        again, so that a front may repeat what it got no answer to.
        """
        ...

    async def tally(self, key: str) -> Tally:
        """What all fronts have seen, empty for an unknown key."""
        ...

    async def save_trace(self, key: str, trace: bytes) -> None:
        """Keep how an experiment's intervals went; only who leads writes it."""
        ...

    async def trace(self, key: str) -> bytes | None: ...

    async def lead(self, front: str, seconds: float) -> bool:
        """Whether this front evaluates experiments now: the first to ask does, while it asks again within `seconds`."""
        ...

    async def forget(self, key: str) -> None:
        """Drop a key's tally and trace."""
        ...

    async def close(self) -> None: ...


class MemoryExperimentStore:
    """Satisfies `ExperimentStore` for fronts within one process. Nothing survives it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._revision = 0
        self._documents: dict[str, bytes] = {}
        self._tallies: dict[str, Tally] = {}
        self._numbers: dict[tuple[str, str], int] = {}
        self._traces: dict[str, bytes] = {}
        self._leader = ("", 0.0)

    async def revision(self) -> int:
        return self._revision

    async def read(self) -> Snapshot:
        return Snapshot(self._revision, dict(self._documents))

    async def write(self, expected_revision: int, changes: Mapping[str, bytes | None]) -> bool:
        """See `ExperimentStore`."""
        if expected_revision != self._revision:
            return False
        for name, document in changes.items():
            if document is None:
                self._documents.pop(name, None)
            else:
                self._documents[name] = document
        self._revision += 1
        return True

    async def add(self, key: str, front: str, number: int, tally: Tally) -> None:
        """See `ExperimentStore`."""
        if number > self._numbers.get((key, front), 0):
            self._numbers[key, front] = number
            self._tallies[key] = self._tallies.get(key, Tally()).merged(tally)

    async def tally(self, key: str) -> Tally:
        """See `ExperimentStore`."""
        return self._tallies.get(key, Tally())

    async def save_trace(self, key: str, trace: bytes) -> None:
        self._traces[key] = trace

    async def trace(self, key: str) -> bytes | None:
        return self._traces.get(key)

    async def lead(self, front: str, seconds: float) -> bool:
        """See `ExperimentStore`."""
        leader, until = self._leader
        now = self._clock()
        if leader != front and now < until:
            return False
        self._leader = (front, now + seconds)
        return True

    async def forget(self, key: str) -> None:
        """See `ExperimentStore`."""
        self._tallies.pop(key, None)
        self._traces.pop(key, None)

    async def close(self) -> None:
        """Nothing is open."""
