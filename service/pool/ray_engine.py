"""One engine as Ray sees it: an actor that is a stand-alone engine."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Sequence

import msgspec

from service.pool.settings import ListenerSettings
from service.pool.standalone import serve_engine
from service.settings import Settings

PAUSE_SECONDS = 3.0
"""Between the failure of an engine and its next start, which Ray makes at once."""


class RayEngine:
    """Ray makes it on some node, and makes it again elsewhere when its node or its process is gone."""

    def __init__(self, settings: Settings, engine_command: Sequence[str] | None) -> None:
        """`settings` are those of the front that asked for it. `engine_command` replaces the engine, for tests."""
        import ray

        here = ray.util.get_node_ip_address()
        host = f"[{here}]" if ":" in here else here
        self._settings = msgspec.structs.replace(settings, listener=ListenerSettings(listen=f"{host}:0"))
        self._command = engine_command
        threading.Thread(target=self._serve, name="engine", daemon=True).start()
        threading.Thread(target=self._end_with_node, args=(os.getppid(),), name="node", daemon=True).start()

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

    @staticmethod
    def _end_with_node(node_pid: int) -> None:
        """Thread: where Ray has lost its head, nodes end without their actors; the next ones would find no room."""
        while os.getppid() == node_pid:
            time.sleep(1.0)
        os._exit(1)
