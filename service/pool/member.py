"""One engine of the pool as the front sees it, from its first announcement over all its restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import structlog

from service.engine_client import EngineRejectedError, EngineUnavailableError
from service.pool.routing import Load
from service.pool.statistics import Totals
from speculation.framing import FramingError
from speculation.messages import (
    Abort,
    Alive,
    BlocksChanged,
    Command,
    Drain,
    Event,
    Prefer,
    Ready,
    Rejected,
    Stats,
    StepOutputs,
    Submit,
)

if TYPE_CHECKING:
    from service.pool.engine_pool import EnginePool
    from service.pool.flight import Flight

Send = Callable[[Command], None]


class Observer(Protocol):
    """Who follows an engine's lives beside the pool."""

    def joined(self) -> None:
        """It has loaded its model."""
        ...

    def changed(self, change: BlocksChanged) -> None:
        """It holds other blocks than before."""
        ...

    def left(self) -> None:
        """It has died."""
        ...


class Member:
    """Made by `EnginePool.add`. `attach`, `dispatch` and `detach` follow the lives of one engine process."""

    def __init__(self, pool: EnginePool, engine_id: str, address: str) -> None:
        """`address` is where it is reached: host:port, or "local" for a process of this front's own."""
        self.engine_id = engine_id
        self.address = address
        self.ready: Ready | None = None
        """What it said when it became ready; None while it does not serve."""
        self.flights: dict[str, Flight] = {}
        self.totals = Totals()
        self.is_draining = False
        self.num_deaths = 0
        self.sequence_seconds = 0.0
        """How long a sequence lasts here, of late."""
        self.observer: Observer | None = None
        """Of an engine that says here what it holds; others tell the store."""
        self.num_held_by_store = 0
        """Blocks that such another one holds, as the store heard last."""
        self.is_warming = False
        """Whether it computes hot prefixes before it serves."""
        self.opened = asyncio.Event()
        """Set while it is loaded and warm."""
        self._pool = pool
        self._send: Send | None = None
        self._log = structlog.get_logger("forerun.pool").bind(engine=engine_id)

    @property
    def is_serving(self) -> bool:
        """Whether it takes new sequences."""
        return self.ready is not None and not self.is_draining and not self.is_warming

    @property
    def state(self) -> str:
        """One of "loading" (the first time or again), "warming", "serving", "draining" and "drained"."""
        if self.is_draining:
            return "drained" if self.ready is None else "draining"
        if self.ready is None:
            return "loading"
        return "warming" if self.is_warming else "serving"

    @property
    def capacity(self) -> int:
        """How many sequences it runs and queues."""
        return self.ready.max_waiting + self.ready.max_num_seqs if self.ready is not None else 0

    @property
    def context_length(self) -> int:
        """Most tokens of a sequence that fits here."""
        ready = self.ready
        return 0 if ready is None else min(ready.max_model_len, (ready.num_blocks - 1) * ready.block_size)

    @property
    def kind(self) -> str:
        """The same for engines that compute the same in the same way."""
        return self.ready.description if self.ready is not None else ""

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second, as it last measured; 0 before it has."""
        stats = self.totals.latest
        return stats.prefill_tokens_per_second if stats else 0.0

    def load(self, typical_tokens: float, prefill_rate: float) -> Load:
        """What it has before it. `typical_tokens` is what a prompt costs of which nothing is known.

        `prefill_rate` is how fast it is taken to be, 0 if that is not known.
        """
        stats = self.totals.latest
        prefilling = [flight for flight in self.flights.values() if flight.is_prefilling]
        foreign_waiting = max((stats.num_waiting if stats else 0) - len(prefilling), 0)
        foreign = max((stats.num_waiting + stats.num_running if stats else 0) - len(self.flights), 0)
        return Load(
            pending_tokens=sum(flight.num_uncached_tokens for flight in prefilling) + foreign_waiting * typical_tokens,
            num_live=len(self.flights) + foreign,
            max_num_seqs=self.ready.max_num_seqs if self.ready is not None else 0,
            prefill_tokens_per_second=prefill_rate,
            sequence_seconds=self.sequence_seconds,
        )

    def attach(self, ready: Ready, send: Send) -> None:
        """It serves; commands for it go to `send`."""
        self.ready, self._send = ready, send
        if self.is_draining:
            send(Drain())
        if self.observer is not None:
            self.observer.joined()
        if not self.is_warming:
            self.open()

    def open(self) -> None:
        """It is warm, and serves."""
        self.is_warming = False
        self.opened.set()
        self._pool.joined()

    def detach(self, error: EngineUnavailableError) -> None:
        """It is gone: what it had goes on elsewhere, unless nothing goes on at all."""
        had_served = self.ready is not None
        # In order of arrival, which is that of the queue but for priorities: behind so many nobody can have run.
        num_running = self.ready.max_num_seqs if self.ready is not None else 0
        self.ready = self._send = None
        self.is_warming = False
        self.opened.clear()
        self.totals.end_life()
        if had_served:
            self.num_deaths += 1
            if self.observer is not None:
                self.observer.left()
        flights, self.flights = list(self.flights.values()), {}
        for index, flight in enumerate(flights):
            flight.end_life(was_running=not num_running or index < num_running)
        self._pool.lost(self, flights, error)

    def dispatch(self, event: Event) -> None:
        """Hand on an event of the engine. One that cannot be handled is logged, and those behind it are."""
        try:
            self._dispatch(event)
        except Exception:  # noqa: BLE001 - the engine and its other events go on
            self._log.exception("an event of the engine could not be handled", event_type=type(event).__name__)

    def _dispatch(self, event: Event) -> None:
        match event:
            case StepOutputs():
                for output in event.outputs:
                    if (flight := self.flights.get(output.request_id)) is not None:
                        self._pool.deliver(flight, output)
            case Rejected():
                if (flight := self.flights.pop(event.request_id, None)) is not None:
                    self._pool.rejected(self, flight, event)
            case Stats():
                self.totals.latest = event
                self._pool.note_stats()
            case BlocksChanged():
                if self.observer is not None:
                    self.observer.changed(event)
            case Alive() | Ready():
                pass

    def take(self, flight: Flight, submit: Submit) -> None:
        """Send a sequence here. Only while it serves. Raises `EngineRejectedError` for what cannot be sent.

        Whatever is raised, nothing of the sequence is kept here.
        """
        assert self._send is not None
        try:
            self._send(submit)
        except FramingError as error:
            message = f"this request cannot be sent to an engine: {error}"
            raise EngineRejectedError(
                Rejected(request_id=flight.request_id, code="invalid", message=message)
            ) from error
        self.flights[flight.request_id] = flight

    def abort(self, request_id: str) -> None:
        """End a sequence; its last output still comes."""
        if self._send is not None:
            self._send(Abort(request_id))

    def prefer(self, identities: list[bytes]) -> None:
        """Tell it which prefixes the whole pool is asked for."""
        if self._send is not None:
            self._send(Prefer(identities))

    def drain(self) -> None:
        """Let it finish what it has and exit. It is given nothing more."""
        if not self.is_draining:
            self.is_draining = True
            if self._send is not None:
                self._send(Drain())
