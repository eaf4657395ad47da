"""What this front has seen and not yet handed to the store: at most one flush interval's worth is ever lost."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection

import structlog

from service.experiments.store import ExperimentStore, StoredValueError
from service.experiments.tally import Tally

_log = structlog.get_logger(__name__)


class Ledger:
    """Tallies by key. A batch that got no answer is sent again under its number, so it counts once."""

    def __init__(self, store: ExperimentStore) -> None:
        self._store = store
        self._front = secrets.token_hex(8)
        self._number = 0
        self._sending = asyncio.Lock()
        self._open: dict[str, Tally] = {}
        self._sent: dict[str, tuple[int, Tally]] = {}
        self._refused: set[str] = set()
        """Keys whose stored value is no tally."""

    @property
    def front(self) -> str:
        """This front's name in the store."""
        return self._front

    def tally(self, key: str) -> Tally:
        """The tally to add to. Do not keep it: after a flush it is another one."""
        return self._open.setdefault(key, Tally())

    async def flush(self, known: Collection[str]) -> None:
        """Hand everything over; what belongs to no known key is dropped. Raises `StoreUnavailable`, and keeps the rest.

        While the store is away what comes in gathers in one tally a key, which is bounded.
        """
        async with self._sending:
            for key in list(self._open):
                if key not in self._sent:
                    self._number += 1
                    self._sent[key] = (self._number, self._open.pop(key))
            for key, (number, tally) in list(self._sent.items()):
                if key in known:
                    try:
                        await self._store.add(key, self._front, number, tally)
                    except StoredValueError as error:
                        self._note_refused(key, error)
                del self._sent[key]

    def _note_refused(self, key: str, error: StoredValueError) -> None:
        """What the store holds under `key` is no tally: what was seen is lost, which is logged once."""
        if key not in self._refused:
            self._refused.add(key)
            _log.error("experiment tally unreadable", key=key, reason=str(error))
