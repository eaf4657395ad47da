"""The service as users start it: a process of its own, with the embedded model."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

START_SECONDS = 240.0
"""Generous: tests share the machine with others."""


class Server:
    """A running service. Leaving the context ends it."""

    def __init__(self, log: Path, *flags: str, module: str = "service") -> None:
        command = [sys.executable, "-m", module, "--port", "0", *flags]
        with log.open("wb") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        self._log = log
        assert self.process.stdout is not None
        self.greeting = self._read_greeting(self.process.stdout)
        found = re.search(r"http://\S+", self.greeting)
        assert found is not None, self.greeting
        self.url = found[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # An engine that a test has stopped would not notice that its front is gone.
        pids = self.engine_pids() if self.process.poll() is None else []
        self.stop(signal.SIGKILL)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def log(self) -> str:
        return self._log.read_text()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it with a signal; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        status = self.process.wait(60)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return status

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as response:  # noqa: S310 - our own address
            return str(response.read().decode())

    def metric(self, name: str) -> float:
        """The value of one line of /metrics."""
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.get("/metrics"), re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    def wait_until_idle(self) -> None:
        """Wait until no sequence runs and every block is free or cached."""
        deadline = time.monotonic() + 60
        while self.metric('forerun_kv_blocks{state="in_use"}') or self.metric("forerun_sequences_running"):
            assert time.monotonic() < deadline, self.get("/metrics")
            time.sleep(0.05)

    def engine_pid(self) -> int:
        """Process id of the engine that serves now."""
        return self.engine_pids()[0]

    def engine_pids(self) -> list[int]:
        """Process ids of all engines there are now."""
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def _read_greeting(self, output: IO[str]) -> str:
        deadline = time.monotonic() + START_SECONDS
        lines: list[str] = []
        while "curl" not in "".join(lines):
            line = output.readline()
            assert line, f"the service did not start: {self.log()[-2000:]}"
            assert time.monotonic() < deadline
            lines.append(line)
        return "".join([*lines, output.readline()])
