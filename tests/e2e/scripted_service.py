"""A service with the scripted engine in a thread of its own, for tests that drive a browser and so cannot be async."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from service.app import create_app
from service.context import FRONT
from service.front import Front
from service.pool.settings import TenantSettings
from service.server import create_runner, listen, url_of
from service.settings import ServerSettings, Settings
from speculation.messages import NgramConfig
from speculation.settings import EngineSettings
from tests.service.conftest import byte_level_tokenizer, scripted_command, write_folder

START_SECONDS = 60.0
Result = TypeVar("Result")


class ScriptedService:
    """A running service. Leaving the context ends it."""

    url: str

    def __init__(self, folder: Path, *, keys: str | None = None, server: ServerSettings | None = None) -> None:
        """`keys`: the text of a file of API keys."""
        model = write_folder(folder, byte_level_tokenizer())
        keys_file = folder / "keys"
        if keys is not None:
            keys_file.write_text(keys)
        settings = Settings(
            server=server or ServerSettings(),
            tenants=TenantSettings(api_keys_file=None if keys is None else str(keys_file)),
            engine=EngineSettings(model=str(model), max_model_len=2048),
            profiles={"fast": NgramConfig(num_speculative_tokens=2)},
        )
        self._app = create_app(settings, scripted_command(settings))
        self._runner = create_runner(self._app)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="service")

    @property
    def front(self) -> Front:
        return self._app[FRONT]

    def run(self, work: Coroutine[None, None, Result]) -> Result:
        """Await something in the service's own loop."""
        future: Future[Result] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(START_SECONDS)

    def __enter__(self) -> Self:
        self._thread.start()
        self.run(self._start())
        self.url = url_of(self._runner)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.run(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        await self._runner.setup()
        await listen(self._runner, "127.0.0.1", 0)
        await self.front.became_ready.wait()
