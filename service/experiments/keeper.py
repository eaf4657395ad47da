"""Keeps this front's book at the store's newest revision, and writes changes that others cannot slip under."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import structlog

from cache_store.metadata import StoreUnavailable
from service.errors import ApiError
from service.experiments.book import Book, Changes, conflict, encode
from service.experiments.model import Profile
from service.experiments.store import ExperimentStore
from speculation.messages import SpeculationConfig

T = TypeVar("T")

MAX_ATTEMPTS = 10

_log = structlog.get_logger(__name__)


class BookKeeper:
    """The book, and the only way to change it."""

    def __init__(self, store: ExperimentStore, initial: Mapping[str, SpeculationConfig], now: float) -> None:
        """Profiles in `initial` are put into the store where it has none of that name: what was changed live stays."""
        self._store = store
        self._initial = {
            name: Profile(name=name, version=1, speculation=config, updated_at=now) for name, config in initial.items()
        }
        self._book = Book(profiles=dict(self._initial))
        self._documents: Mapping[str, bytes] = {}
        """As they are in the store, of the book's revision."""
        self._reported: dict[str, bytes] = {}
        """Unreadable documents that were logged, by name."""

    @property
    def book(self) -> Book:
        """As of the last exchange with the store."""
        return self._book

    async def keep_up(self) -> None:
        """Read the store if it has changed. Raises `StoreUnavailable`."""
        if await self._store.revision() != self._book.revision or self._initial:
            await self._read()

    async def refresh(self) -> Book:
        """The newest book. Raises `ApiError` (503) if the store is away."""
        await answered(self._read())
        return self._book

    async def change(self, edit: Callable[[Book], Changes]) -> Book:
        """Write what `edit` makes of the newest book; again if somebody else wrote meanwhile. Raises `ApiError`."""
        for _ in range(MAX_ATTEMPTS):
            book = await self.refresh()
            changes = edit(book)
            if not changes or await answered(self._store.write(book.revision, encode(changes, self._documents))):
                return await self.refresh()
        raise conflict("others keep changing profiles and experiments; try again")

    async def _read(self) -> None:
        """Take over the store's documents. One that has lost its memory is given ours."""
        snapshot = await self._store.read()
        missing: Changes = {}
        if snapshot.revision == 0:
            missing = self._book.documents()
        elif self._initial:
            initial = {f"profile/{name}": profile for name, profile in self._initial.items()}
            missing = {name: profile for name, profile in initial.items() if name not in snapshot.documents}
        if missing:
            await self._store.write(snapshot.revision, encode(missing))
            snapshot = await self._store.read()
        self._initial = {}
        self._book, self._documents = Book.decode(snapshot), snapshot.documents
        self._note_unreadable()

    def _note_unreadable(self) -> None:
        """Log each unreadable document once for as long as it stays the same."""
        unreadable = {name: self._documents[name] for name in self._book.unreadable}
        for name, document in unreadable.items():
            if self._reported.get(name) != document:
                reason = self._book.unreadable[name]
                _log.error("experiment document unreadable", document=name[:200], reason=reason)
        self._reported = unreadable


async def answered(answer: Awaitable[T]) -> T:
    """What the store says, or `ApiError` (503)."""
    try:
        return await answer
    except StoreUnavailable as error:
        message = f"the store of profiles and experiments does not answer: {error}"
        raise ApiError.unavailable(message, "store_unavailable") from error
