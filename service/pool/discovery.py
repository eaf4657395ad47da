"""Finds stand-alone engines in the store, and keeps those of this front's model connected."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from cache_store.metadata import EngineStatus
from service.background import run_forever
from service.pool.address import SCHEME
from service.pool.engine_pool import EnginePool
from service.pool.member import Member
from service.pool.remote import RemoteEngine
from service.pool.store import PoolStore

LOOK_SECONDS = 1.0


class Discovery:
    """What the store says is a hint: an engine that it forgot but that is connected goes on serving."""

    def __init__(
        self,
        pool: EnginePool,
        store: PoolStore,
        *,
        connect: Callable[[Member], RemoteEngine],
        served_fingerprint: Callable[[], str | None],
    ) -> None:
        """`served_fingerprint` is that of the model served here, or None as long as any may be the first."""
        self._pool = pool
        self._store = store
        self._connect = connect
        self._served_fingerprint = served_fingerprint
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._missed: dict[str, int] = {}
        """How many looks in a row did not find an engine."""
        self._instances: dict[str, str] = {}
        """The life of each engine that was last heard of."""
        self._strangers: set[str] = set()
        self._refused: set[tuple[str, str]] = set()
        """Ids and addresses of announcements that could not be used; each is logged once."""
        self._log = structlog.get_logger("forerun.pool")

    async def run(self) -> None:
        """Look until cancelled; then every connection is closed."""
        try:
            await run_forever("engines in the store", self._look, LOOK_SECONDS)
        finally:
            await self._end(list(self._tasks))

    async def _look(self) -> None:
        statuses = await self._store.guarded.engines()
        if statuses is not None:
            await self._follow(statuses)

    async def _follow(self, statuses: list[EngineStatus]) -> None:
        """Connect who is new, and forget who has been gone for as long as the store remembers anybody."""
        self._strangers.intersection_update(status.engine_id for status in statuses)
        found = {status.engine_id: status for status in statuses if self._is_ours(status)}
        for engine_id, status in found.items():
            member = self._pool.members.get(engine_id)
            if member is not None and engine_id not in self._tasks:
                self._refuse(status, "an engine of this front's own has that id")
                continue
            if member is not None and member.address != status.address:
                await self._end([engine_id])
                member = None
            if member is None and not status.draining:
                self._start(status)
            elif member is not None:
                member.num_held_by_store = status.blocks_held
                self._note_draining(member, status)
        self._refused = {refused for refused in self._refused if refused[0] in found}
        for engine_id in list(self._tasks):
            self._missed[engine_id] = 0 if engine_id in found else self._missed.get(engine_id, 0) + 1
        patience = self._store.retention.ttl_seconds / LOOK_SECONDS
        gone = [each for each, missed in self._missed.items() if missed > patience and not self._is_connected(each)]
        await self._end(gone)

    def _note_draining(self, member: Member, status: EngineStatus) -> None:
        """It takes no more until its next life, whoever asked it to."""
        if self._instances.get(member.engine_id) != status.instance:
            self._instances[member.engine_id] = status.instance
            member.is_draining = False
        if status.draining:
            member.is_draining = True

    def _is_ours(self, status: EngineStatus) -> bool:
        """Whether it can be reached from here and has the model that is served here."""
        served = self._served_fingerprint()
        if served is None or status.model_fingerprint == served:
            self._strangers.discard(status.engine_id)
            return status.address.startswith(SCHEME)
        if status.engine_id not in self._strangers:
            self._strangers.add(status.engine_id)
            self._log.warning(
                "engine of another model in this namespace; it is not used, but profiles and experiments are shared",
                engine=status.engine_id,
                fingerprint=status.model_fingerprint,
                served=served,
            )
        return False

    def _is_connected(self, engine_id: str) -> bool:
        return self._pool.members[engine_id].ready is not None

    def _start(self, status: EngineStatus) -> None:
        member = self._pool.add(status.engine_id, status.address)
        try:
            remote = self._connect(member)
        except Exception as error:  # noqa: BLE001 - one announcement must not hide the others
            self._pool.remove(member)
            self._refuse(status, str(error))
            return
        self._instances[status.engine_id] = status.instance
        self._tasks[status.engine_id] = asyncio.create_task(remote.run(), name=status.engine_id)

    def _refuse(self, status: EngineStatus, reason: str) -> None:
        """Log once that an announcement in the store cannot be used."""
        announced = (status.engine_id, status.address)
        if announced not in self._refused:
            self._refused.add(announced)
            self._log.warning(
                "engine announced in the store cannot be used",
                engine=status.engine_id[:100],
                address=status.address[:100],
                reason=reason[:300],
            )

    async def _end(self, engine_ids: list[str]) -> None:
        """Give up engines. What they still had is placed again, unless the service ends."""
        tasks = [self._tasks.pop(engine_id) for engine_id in engine_ids]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for engine_id in engine_ids:
            self._missed.pop(engine_id, None)
            self._instances.pop(engine_id, None)
            self._pool.remove(self._pool.members[engine_id])
