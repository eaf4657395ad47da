"""A node of a real Ray cluster for tests, as `ray start` starts it; ended by the id of its session."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_SECONDS = 120.0
RAY = (sys.executable, "-m", "ray.scripts.scripts")
"""The command `ray`, whether or not it is on PATH."""


class RayNode:
    """What one command starts, and what that starts: nothing leaves the session, so its id names all of it.

    Each keeps what it writes in a folder of its own, and so is a machine of its own to others.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Starts it, with `environment` over that of the tests."""
        # A short name: sockets lie in there.
        self._folder = Path(tempfile.mkdtemp(prefix="ray-"))
        self._log = self._folder / "log"
        # Nodes find the project where this test does; Ray writes nowhere else, and tells nobody.
        own = {
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            "RAY_TMPDIR": str(self._folder),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **own, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=ROOT,
                start_new_session=True,
            )

    def log(self) -> str:
        return self._log.read_text()

    async def until_it_says(self, text: str) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while text not in self.log():
                await asyncio.sleep(0.05)

    def kill(self) -> None:
        """End all of it at once, as a machine that is lost does. Again is harmless."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while pids := list(self.pids()):
            assert time.monotonic() < deadline, pids
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        self.process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def pids(self) -> Iterator[int]:
        """Its processes that run."""
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and self._has(folder):
                yield int(folder.name)

    def _has(self, folder: Path) -> bool:
        try:
            state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            return False
        return int(session) == self.process.pid and state != "Z"
