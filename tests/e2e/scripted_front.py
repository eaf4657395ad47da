"""A front in a process of its own, with the scripted engine: `python -m tests.e2e.scripted_front --port 0 …`."""

from __future__ import annotations

import asyncio
import os
import sys

from service.app import create_app
from service.context import FRONT
from service.server import create_runner, greeting, listen, url_of
from service.settings import load_settings
from tests.service.conftest import scripted_command


async def main() -> None:
    settings = load_settings(sys.argv[1:], os.environ)
    app = create_app(settings, scripted_command(settings))
    runner = create_runner(app)
    await runner.setup()
    await listen(runner, settings.server.host, settings.server.port)
    await app[FRONT].became_ready.wait()
    print(greeting(app[FRONT], url_of(runner)), flush=True)  # noqa: T201 - what who started it waits for
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
