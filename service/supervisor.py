"""Keeps an engine alive: starts it, passes its events on, tells everybody when it dies, starts it again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

import structlog

from service.engine_client import EngineUnavailableError
from service.engine_link import EngineDiedError
from service.engine_process import EngineProcess, start_engine
from speculation.messages import Command, Event, Loading, Ready

FIRST_PAUSE_SECONDS = 0.1
STEADY_SECONDS = 60.0
"""An engine that served for so long has earned a quick restart."""


class EngineStartError(Exception):
    """The engine never served, or its model is of no use to the front: starting it again would not help."""


class EngineSink(Protocol):
    """Who is told of an engine's lives, and what it says in them."""

    @property
    def is_draining(self) -> bool:
        """Whether the engine is to end when it has nothing left to do."""
        ...

    def attach(self, ready: Ready, send: Callable[[Command], None]) -> None:
        """It serves; commands for it go to `send`."""
        ...

    def dispatch(self, event: Event) -> None:
        """It has said something."""
        ...

    def detach(self, error: EngineUnavailableError) -> None:
        """It is gone; `error` says why."""
        ...

    def drain(self) -> None:
        """Let it finish what it has and exit."""
        ...


class Supervisor:
    """Owns the engine process. `run` is its whole life; cancelling that ends the process."""

    def __init__(
        self,
        command: Sequence[str],
        sink: EngineSink,
        *,
        on_ready: Callable[[Ready], Awaitable[None]],
        on_lost: Callable[[], None],
        load_seconds: float,
        restart_seconds: float,
        silence_seconds: float,
        stop_seconds: float = 5.0,
        cores: Sequence[int] | None = None,
    ) -> None:
        """`cores` are those the process keeps to; None for all."""
        self._command = command
        self._sink = sink
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._load_seconds = load_seconds
        self._restart_seconds = restart_seconds
        self._silence_seconds = silence_seconds
        self._stop_seconds = stop_seconds
        self._cores = cores
        self._has_served = False
        self.on_loading: Callable[[str], None] | None = None
        """Told what the engine does while it loads; without it the log is."""
        self._log = structlog.get_logger("forerun.supervisor")
        self.pid: int | None = None
        """The engine's process id while it serves."""

    def drain(self) -> None:
        """Let the engine finish and exit, and do not start it again: `run` then returns."""
        self._sink.drain()

    def _is_wanted(self) -> bool:
        return not self._sink.is_draining

    async def run(self) -> None:
        """Serve until `drain` or cancellation. Raises `EngineStartError` if the first engine never serves."""
        pause = FIRST_PAUSE_SECONDS
        while self._is_wanted():
            started = time.monotonic()
            try:
                await self._live()
            except EngineStartError:
                raise
            except Exception as died:
                if not isinstance(died, EngineDiedError):
                    self._log.exception("a life of the engine ended by an error of the service")
                if not self._is_wanted():
                    return
                if not self._has_served:
                    raise EngineStartError(f"the engine did not start: {died}; its own log lines say why") from died
                if time.monotonic() - started > STEADY_SECONDS:
                    pause = FIRST_PAUSE_SECONDS
                self._log.error("engine died", reason=str(died), restart_in_seconds=pause)
            await asyncio.sleep(pause)
            pause = min(pause * 2, self._restart_seconds)

    async def _live(self) -> None:
        """One engine from start to death; always raises in the end, `EngineDiedError` if it died."""
        async with start_engine(
            self._command,
            connect_seconds=self._load_seconds,
            stop_seconds=self._stop_seconds,
            cores=self._cores,
        ) as process:
            events = process.events(self._silence_seconds)
            try:
                await self._load(process, events)
                async for event in events:
                    if isinstance(event, Ready):
                        raise EngineDiedError("the engine announced itself twice")
                    self._sink.dispatch(event)
            except EngineDiedError as died:
                self._lose(EngineUnavailableError(f"the engine stopped while this request ran ({died})", "engine_died"))
                raise
            except asyncio.CancelledError:
                self._lose(EngineUnavailableError("the service is shutting down", "shutting_down"))
                raise
            except EngineStartError:
                raise
            except Exception:
                self._lose(
                    EngineUnavailableError("the engine was stopped after an error in the service", "engine_died")
                )
                raise
            finally:
                await events.aclose()

    async def _load(self, process: EngineProcess, events: AsyncIterator[Event]) -> None:
        """Wait until the model is loaded. Raises `EngineStartError` if the front cannot use it."""
        try:
            async with asyncio.timeout(self._load_seconds):
                ready = await anext(events)
                while isinstance(ready, Loading):
                    self._say(ready.phase)
                    ready = await anext(events)
        except TimeoutError:
            raise EngineDiedError(f"the engine did not load its model within {self._load_seconds:g} s") from None
        if not isinstance(ready, Ready):
            raise EngineDiedError(f"the engine said {type(ready).__name__} before Ready")
        try:
            await self._on_ready(ready)
        except ValueError as error:
            raise EngineStartError(str(error)) from error
        self._sink.attach(ready, process.send)
        self.pid, self._has_served = process.pid, True
        self._log.info("engine ready", pid=process.pid, description=ready.description, blocks=ready.num_blocks)

    def _say(self, phase: str) -> None:
        if self.on_loading is None:
            self._log.info("engine loading", phase=phase)
        else:
            self.on_loading(phase)

    def _lose(self, error: EngineUnavailableError) -> None:
        """Tell everybody at once, before the process is certainly gone."""
        self.pid = None
        self._sink.detach(error)
        if self._has_served and self._is_wanted():
            self._on_lost()
