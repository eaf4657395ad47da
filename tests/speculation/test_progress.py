"""Progress of long commands, where standard error is no terminal."""

from __future__ import annotations

import io
import sys

import pytest

from speculation.progress import LineWriter, progress_bar


def test_a_pipe_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each report is a line with the count, the total and the time; nothing is redrawn."""
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)
    monkeypatch.setattr("speculation.progress.LINE_SECONDS", 0.0)
    with progress_bar("prompts", 3) as bar:
        for _ in range(3):
            bar.update(1)
    lines = errors.getvalue().splitlines()
    assert "\r" not in errors.getvalue()
    assert lines[0].startswith("prompts: 0/3 after 00:00")
    assert lines[-1].startswith("prompts: 3/3 after")


def test_a_line_is_written_once() -> None:
    """What a bar redraws without news is left out."""
    stream = io.StringIO()
    writer = LineWriter(stream)
    for text in ("\ra: 1", "\ra: 1", "\n", "\ra: 2", ""):
        writer.write(text)
    writer.flush()
    assert stream.getvalue() == "a: 1\na: 2\n"
