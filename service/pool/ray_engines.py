"""Engines that Ray places on the nodes of a cluster, restarts elsewhere when a node dies, and takes down in the end.

Ray carries their life cycle and nothing else: each is a stand-alone engine (`ray_engine`), which announces itself in
the store like any other, and tokens go over the same sockets. A process beside the front speaks to Ray (`ray_driver`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import msgspec
import structlog

from service.engine_process import describe_exit
from service.pool.ray_driver import LEAVE_SECONDS, Connected, Failed, Message, Order, Placed, Waiting
from service.pool.security import Security
from service.pool.store import MEMORY
from service.settings import Settings

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0


class RayLostError(Exception):
    """The driver has ended, or the cluster does not answer."""


class RayEngines:
    """Has as many engines placed as are wanted. `run` is their whole life, unless they are kept."""

    def __init__(
        self, settings: Settings, engine_command: Sequence[str] | None = None, *, connect_seconds: float = 60.0
    ) -> None:
        """The cluster may take `connect_seconds` to answer. `engine_command` replaces the engine, for tests.

        Raises ValueError, naming the setting, where engines elsewhere could not be found or trusted.
        """
        pool, device = settings.pool, settings.engine.device
        if pool.store == MEMORY:
            raise ValueError("ray needs a store that other machines reach: set store to redis://…")
        security = Security.load(pool)
        if security.secret is None and security.server_tls is None:
            raise ValueError(
                "ray needs secret (FORERUN_SECRET), or tls_cert, tls_key and tls_ca: engines are elsewhere"
            )
        if device.startswith("cuda:"):
            raise ValueError(f"device is {device!r}, but Ray chooses the device of each engine: say device cuda")
        self._order = msgspec.json.encode(Order(settings, engine_command)) + b"\n"
        self._connect_seconds = connect_seconds
        self._address = pool.ray
        self._has_placed = False
        self._is_lost = False
        """Since the cluster was found last."""
        self._pause = FIRST_PAUSE_SECONDS
        self._log = structlog.get_logger("forerun.ray")

    async def run(self) -> None:
        """Keep the engines placed until cancelled. Raises ValueError if that never succeeds."""
        while True:
            try:
                async with self._driver() as driver:
                    await self._follow(driver)
            except Exception as lost:
                if not isinstance(lost, RayLostError):
                    self._log.exception("what speaks to Ray ended by an error of the service")
                if not self._has_placed:
                    raise ValueError(str(lost)) from lost
                self._note_lost(str(lost))
            await asyncio.sleep(self._pause)
            self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)

    async def _follow(self, driver: asyncio.subprocess.Process) -> None:
        """Pass on what the driver says; always raises `RayLostError` in the end."""
        try:
            async with asyncio.timeout(self._connect_seconds):
                self._note(await self._hear(driver))
        except TimeoutError:
            raise RayLostError(
                f"ray is {self._address!r}, and no cluster answered there within {self._connect_seconds:g} s"
            ) from None
        while True:
            self._note(await self._hear(driver))

    async def _hear(self, driver: asyncio.subprocess.Process) -> Message:
        assert driver.stdout is not None
        try:
            line = await driver.stdout.readline()
            if line:
                return msgspec.json.decode(line, type=Message)
        except ValueError as error:  # a line that is too long, or no message
            raise RayLostError(f"what speaks to Ray said something else: {error}") from error
        raise RayLostError(f"what speaks to Ray is gone{describe_exit(await driver.wait())}")

    def _note(self, message: Message) -> None:
        match message:
            case Connected():
                self._is_lost = False
                self._log.info("Ray cluster found", address=self._address)
            case Waiting(num_placed, each_needs, cluster_has):
                self._log.warning(
                    "engines wait for a place in the Ray cluster",
                    placed=num_placed,
                    each_needs=each_needs,
                    cluster_has=cluster_has,
                )
            case Placed(nodes):
                self._has_placed = True
                self._pause = FIRST_PAUSE_SECONDS
                self._log.info("engines placed by Ray", nodes=nodes)
            case Failed(reason):
                raise RayLostError(reason)

    def _note_lost(self, reason: str) -> None:
        """Say it once, however long the cluster is sought."""
        if not self._is_lost:
            self._log.warning(
                "the Ray cluster is lost; engines are placed again when one answers at its address",
                address=self._address,
                reason=reason,
            )
        self._is_lost = True

    @asynccontextmanager
    async def _driver(self) -> AsyncIterator[asyncio.subprocess.Process]:
        """A driver that has its order. At the end it has taken the engines down, and is gone."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "service.pool.ray_driver"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,  # Ray's own lines; its session's folder has them, too
            # Ray tells its makers how it is used, unless told not to.
            env={"RAY_USAGE_STATS_ENABLED": "0", **os.environ},
            start_new_session=True,
        )
        assert process.stdin is not None
        try:
            process.stdin.write(self._order)
            yield process
        finally:
            process.stdin.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_SECONDS):
                    await process.wait()
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
