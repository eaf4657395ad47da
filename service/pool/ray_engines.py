"""Engines that Ray places on the nodes of a cluster, restarts elsewhere when a node dies, and takes down in the end.

Ray carries their life cycle and nothing else: each actor is a stand-alone engine, which announces itself in the store
like any other, and tokens go over the same sockets.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
import structlog

from service.pool.security import Security
from service.pool.settings import ListenerSettings, PoolSettings
from service.pool.standalone import serve_engine
from service.pool.store import MEMORY
from service.settings import Settings

PAUSE_SECONDS = 3.0
"""Between the failure of an engine and its next start, which Ray makes at once."""


class EngineActor:
    """One engine on some node. Ray makes it, and makes it again elsewhere when its node or its process is gone."""

    def __init__(self, settings: bytes, engine_command: Sequence[str] | None) -> None:
        """`settings` are `Settings` as JSON, of the front that asked for it."""
        import ray

        here = ray.util.get_node_ip_address()
        host = f"[{here}]" if ":" in here else here
        tree = msgspec.json.decode(settings, type=Settings)
        self._settings = msgspec.structs.replace(tree, listener=ListenerSettings(listen=f"{host}:0"))
        self._command = engine_command
        threading.Thread(target=self._serve, name="engine", daemon=True).start()

    def node(self) -> str:
        """Where it runs. Answers as soon as it does."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def _serve(self) -> None:
        """Thread: the engine's whole life. One that was drained has ended well, and stays away."""
        status = asyncio.run(serve_engine(self._settings, print, asyncio.Event(), self._command))
        if status:
            time.sleep(PAUSE_SECONDS)
            os._exit(status)


class RayEngines:
    """As many actors as engines are wanted, in one placement group. `run` is their whole life, unless they are kept."""

    def __init__(self, settings: Settings, engine_command: Sequence[str] | None = None) -> None:
        """Raises ValueError, naming the setting, where engines elsewhere could not be found or trusted."""
        pool = settings.pool
        if pool.store == MEMORY:
            raise ValueError("ray needs a store that other machines reach: set store to redis://…")
        security = Security.load(pool)
        if security.secret is None and security.server_tls is None:
            raise ValueError(
                "ray needs secret (FORERUN_SECRET), or tls_cert, tls_key and tls_ca: engines are elsewhere"
            )
        self._settings = settings
        self._command = engine_command
        self._actors: list[Any] = []
        self._group: Any = None
        self._turn = threading.Lock()
        """A start that was given up still ends before what it started is taken down."""
        self._log = structlog.get_logger("forerun.ray")

    async def run(self) -> None:
        """Place the engines and keep them until cancelled. Raises ValueError if the cluster cannot be used."""
        try:
            await asyncio.to_thread(self._start)
            await asyncio.Event().wait()
        finally:
            await asyncio.to_thread(self._stop)

    def _start(self) -> None:
        with self._turn:
            self._place()

    def _place(self) -> None:
        try:
            import ray
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
        except ImportError as error:
            raise ValueError("ray is not installed; the extra `ray` brings it: pip install 'forerun[ray]'") from error
        pool = self._settings.pool
        try:
            ray.init(pool.ray, namespace=f"forerun-{pool.namespace}", log_to_driver=False, configure_logging=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ValueError(f"ray is {pool.ray!r}, and no cluster answers there: {error}") from error
        bundle = self._bundle(ray.cluster_resources())
        self._group = self._placement_group(bundle, pool)
        strategy = PlacementGroupSchedulingStrategy(self._group)
        actor = ray.remote(EngineActor)
        encoded = msgspec.json.encode(self._settings)
        self._actors = [
            actor.options(
                name=f"engine-{index}",
                get_if_exists=True,
                lifetime="detached" if pool.ray_keep else None,
                max_restarts=-1,
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=strategy,
            ).remote(encoded, self._command)
            for index in range(pool.engines)
        ]
        nodes = ray.get([actor.node.remote() for actor in self._actors])
        self._log.info("engines placed", nodes=nodes, resources=bundle)

    def _bundle(self, available: dict[str, float]) -> dict[str, float]:
        """What one engine is given: a GPU where there are any, unless it is to run on a CPU."""
        device = self._settings.engine.device
        if device.startswith("cuda") or (device == "auto" and available.get("GPU")):
            return {"GPU": 1, "CPU": 1}
        return {"CPU": 1}

    @staticmethod
    def _placement_group(bundle: dict[str, float], pool: PoolSettings) -> Any:
        """A place for each engine. One that was kept is taken over."""
        from ray.util import get_placement_group, placement_group

        name = f"forerun-{pool.namespace}"
        if pool.ray_keep:
            with suppress(ValueError):
                return get_placement_group(name)
        return placement_group(
            [bundle] * pool.engines,
            strategy=pool.ray_strategy.upper(),
            name=name if pool.ray_keep else "",
            lifetime="detached" if pool.ray_keep else None,
        )

    def _stop(self) -> None:
        with self._turn, suppress(ImportError):
            self._leave()

    def _leave(self) -> None:
        import ray
        from ray.util import remove_placement_group

        if not ray.is_initialized():
            return
        if not self._settings.pool.ray_keep:
            for actor in self._actors:
                ray.kill(actor)
            if self._group is not None:
                remove_placement_group(self._group)
        ray.shutdown()
