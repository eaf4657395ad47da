"""Stand-alone scripted engines as processes of their own, and what their fronts know of them."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from tests.service.conftest import Service

START_SECONDS = 60.0
SECRET = "correct horse"


class Standalone:
    """One engine process with its worker. Started by `start`, ended by `stop`."""

    def __init__(self, process: asyncio.subprocess.Process, lines: list[str], log: Path) -> None:
        self.process = process
        self.lines = lines
        self._log = log

    @classmethod
    async def start(
        cls,
        folder: Path,
        log: Path,
        *flags: str,
        fingerprint: str = "scripted",
        environment: Mapping[str, str] | None = None,
        wait: bool = True,
        prefix: tuple[str, ...] = (),
    ) -> Standalone:
        """Start one and wait until it serves."""
        command = [
            *prefix,
            sys.executable,
            "-m",
            "tests.service.pool.scripted_engine",
            str(folder),
            fingerprint,
            *flags,
        ]
        with log.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **(environment or {})},
            )
        engine = cls(process, [], log)
        if wait:
            await engine.until_it_says("forerun engine serves at")
        return engine

    @property
    def port(self) -> int:
        found = re.search(r"tcp://\S+:(\d+)", "\n".join(self.lines))
        assert found is not None, self.log()
        return int(found[1])

    @property
    def worker_pid(self) -> int:
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def log(self) -> str:
        return self._log.read_text()

    async def until_it_says(self, text: str) -> None:
        assert self.process.stdout is not None
        async with asyncio.timeout(START_SECONDS):
            while not any(text in line for line in self.lines):
                line = (await self.process.stdout.readline()).decode()
                assert line, self.log()
                self.lines.append(line)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def stop(self, number: signal.Signals = signal.SIGKILL) -> int:
        """End it; the exit status."""
        if self.process.returncode is None:
            self.process.send_signal(number)
        async with asyncio.timeout(30):
            status = await self.process.wait()
        transport = getattr(self.process, "_transport", None)
        if transport is not None:
            transport.close()
        return status


StartEngine = Callable[..., Awaitable[Standalone]]


def num_running(service: Service) -> int:
    """How many sequences run in all engines, as a front knows it."""
    stats = service.front.metrics.engine.stats
    return stats.num_running if stats is not None else 0
