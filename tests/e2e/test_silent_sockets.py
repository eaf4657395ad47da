"""More silent sockets than the service has files."""

from __future__ import annotations

import json
import resource
import selectors
import socket
import time
import urllib.request
from pathlib import Path

from tests.e2e.server import Server
from tests.service.conftest import byte_level_tokenizer, write_folder

NUM_FILES = 256
NUM_SOCKETS = 600
PATIENCE_SECONDS = 60.0


def test_silent_sockets_do_not_make_the_service_deaf(tmp_path: Path) -> None:
    """With more sockets than files requests are answered, the log stays small, and every socket is closed."""
    model = write_folder(tmp_path / "model", byte_level_tokenizer())
    flags = ["--model", str(model), "--max-connections", "80", "--header-seconds", "2"]
    with Server(tmp_path / "log", *flags, module="tests.e2e.scripted_front") as server:
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (NUM_FILES, NUM_FILES))
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        sockets: list[socket.socket] = []
        try:
            for index in range(NUM_SOCKETS):
                sockets.append(socket.create_connection(address))
                if index % 50 == 0:
                    assert ask(server.url) == 200
            with selectors.DefaultSelector() as selector:
                for each in sockets:
                    selector.register(each, selectors.EVENT_READ)
                deadline = time.monotonic() + PATIENCE_SECONDS
                while selector.get_map():
                    assert time.monotonic() < deadline
                    for key, _ in selector.select(1.0):
                        selector.unregister(key.fileobj)
                    assert ask(server.url) == 200
        finally:
            for each in sockets:
                each.close()
        assert (tmp_path / "log").stat().st_size < 500_000


def ask(url: str) -> int:
    """The status of one small request on a connection of its own."""
    body = json.dumps({"prompt": "hi", "max_tokens": 1}).encode()
    with urllib.request.urlopen(f"{url}/v1/completions", data=body, timeout=30) as response:  # noqa: S310 - our own
        return int(response.status)
