"""What a service says while it starts: to people on a terminal, and as JSON elsewhere."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.tiny_folder import write_tiny_folder

START_SECONDS = 120.0


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A start of the service with a tiny model and an empty folder of machine code."""
    folder = tmp_path_factory.mktemp("start")
    write_tiny_folder(folder / "model")
    flags = ["--model", str(folder / "model"), "--port", "0", "--cache-dir", str(folder / "cache")]
    return [sys.executable, "-m", "service", *flags]


@contextmanager
def started(command: list[str], stderr: int) -> Iterator[subprocess.Popen[bytes]]:
    """The service, ended at the end."""
    with subprocess.Popen(command, stdout=stderr, stderr=stderr, stdin=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def read_until(descriptor: int, words: bytes) -> str:
    """What is written, until the words are."""
    text, ends_at = b"", time.monotonic() + START_SECONDS
    while words not in text:
        assert time.monotonic() < ends_at, text.decode()
        if select.select([descriptor], [], [], 1.0)[0]:
            text += os.read(descriptor, 65536)
    return text.decode()


def test_a_terminal_shows_the_phases_in_one_line(command: list[str]) -> None:
    """On a terminal the start is one line that is redrawn, and log lines are coloured words, no JSON."""
    terminal, other = pty.openpty()
    with started(command, other):
        os.close(other)
        text = read_until(terminal, b"Try it in a browser")
    os.close(terminal)
    drawn = re.findall(r"\r\x1b\[2Kengine: ([^\r]*?) … \d+ s", text)
    assert "loading the weights" in drawn
    assert len(set(drawn)) >= 3
    assert "\x1b[2m" in text
    assert '{"' not in text.split("Try it")[0]
    assert re.search(r"listening.*phase.*=.*loading", text)


def test_elsewhere_the_phases_are_json_lines(command: list[str]) -> None:
    """In a file or a pipe each phase is a log event, and every line begins with its time, level, logger and event."""
    reading, writing = os.pipe()
    with started(command, writing):
        os.close(writing)
        text = read_until(reading, b"Try it in a browser")
    os.close(reading)
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    phases = [line["phase"] for line in lines if line["event"] == "engine loading"]
    assert "loading the weights" in phases
    assert len(phases) >= 3
    assert all(list(line)[:2] == ["timestamp", "level"] for line in lines)
    events = [line["event"] for line in lines]
    assert events.count("engine ready") == 1
    assert events.index("engine loading") < events.index("engine ready")


@pytest.mark.parametrize(("log_format", "is_json"), [("json", True), ("console", False)])
def test_the_form_of_lines_can_be_set(command: list[str], log_format: str, is_json: bool, tmp_path: Path) -> None:
    """`--log-format` holds for the service and its engine, whatever they write to."""
    path = tmp_path / "log"
    with path.open("wb") as file, started([*command, "--log-format", log_format], file.fileno()):
        ends_at = time.monotonic() + START_SECONDS
        while b"Try it in a browser" not in path.read_bytes():
            assert time.monotonic() < ends_at, path.read_text()
            time.sleep(0.1)
    head = path.read_text().split("forerun serves")[0].strip().splitlines()
    assert {line.startswith("{") for line in head} == {is_json}
    assert any("engine loaded" in line for line in head)
    assert "\x1b" not in path.read_text()
