"""The engines that this front starts and keeps alive itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import structlog

from service.pool.engine_pool import EnginePool
from service.pool.prefixes import Prefixes
from service.pool.reporter import Reporter
from service.pool.store import PoolStore
from service.supervisor import EngineStartError, Supervisor
from speculation.messages import Ready

LOCAL = "local"
"""The address of an engine that only this front can reach."""


@dataclass(frozen=True, slots=True)
class LocalEngine:
    """What one engine is started with."""

    engine_id: str
    command: Sequence[str]
    cores: tuple[int, ...] | None = None


class LocalEngines:
    """A supervisor for each engine. `run` is their whole life; cancelling that ends the processes."""

    def __init__(
        self,
        engines: Sequence[LocalEngine],
        pool: EnginePool,
        prefixes: Prefixes,
        store: PoolStore,
        *,
        on_ready: Callable[[Ready], Awaitable[None]],
        on_lost: Callable[[], None],
        load_seconds: float,
        restart_seconds: float,
        silence_seconds: float,
        warm_seconds: float,
        warm_prefixes: int,
    ) -> None:
        self._restart_seconds = restart_seconds
        self._is_over = asyncio.Event()
        self._failures: dict[str, EngineStartError] = {}
        self._log = structlog.get_logger("forerun.pool")
        members = {engine.engine_id: pool.add(engine.engine_id, LOCAL) for engine in engines}
        self._reporters = [
            Reporter(member, prefixes, store, warm_seconds=warm_seconds, warm_prefixes=warm_prefixes)
            for member in members.values()
        ]
        for member, reporter in zip(members.values(), self._reporters, strict=True):
            member.observer = reporter
        self.supervisors = {
            engine.engine_id: Supervisor(
                engine.command,
                members[engine.engine_id],
                on_ready=on_ready,
                on_lost=on_lost,
                load_seconds=load_seconds,
                restart_seconds=restart_seconds,
                silence_seconds=silence_seconds,
                cores=engine.cores,
            )
            for engine in engines
        }

    async def run(self) -> None:
        """Serve until `drain` or cancellation. Raises `EngineStartError` if no engine can be started."""
        tasks = [asyncio.create_task(self._keep(engine_id), name=engine_id) for engine_id in self.supervisors]
        try:
            await asyncio.gather(*tasks)
            await self._is_over.wait()
        finally:
            for task in tasks:
                if not task.cancelling():  # a second time would cut short how it ends its process
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(reporter.close() for reporter in self._reporters))

    def drain(self) -> None:
        """Let every engine finish and exit, and start none again: `run` then returns."""
        self._is_over.set()
        for supervisor in self.supervisors.values():
            supervisor.drain()

    async def _keep(self, engine_id: str) -> None:
        """One engine. If it never serves although others do, it is tried again, now and then."""
        while True:
            try:
                await self.supervisors[engine_id].run()
            except EngineStartError as error:
                self._failures[engine_id] = error
                if len(self._failures) == len(self.supervisors):
                    raise
                self._log.error("engine does not start", engine=engine_id, reason=str(error))
                await asyncio.sleep(self._restart_seconds)
                self._failures.pop(engine_id)
            else:
                return
