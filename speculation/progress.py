"""Progress of long commands: a bar on a terminal, elsewhere a line every few seconds."""

from __future__ import annotations

import sys
from typing import Any, TextIO

from tqdm import tqdm

BAR_SECONDS = 2.0
"""Least time between two redraws of a bar."""
LINE_SECONDS = 10.0
"""Least time between two lines."""


class LineWriter:
    """A text stream in which each redraw of a bar is a line of its own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last = ""

    def write(self, text: str) -> None:
        """Write what is not empty, and not what the line before said."""
        line = text.strip("\r\n ")
        if line and line != self._last:
            self._stream.write(f"{line}\n")
            self._last = line

    def flush(self) -> None:
        """Hand on what was written."""
        self._stream.flush()


def progress_bar(description: str, total: int | None = None) -> Any:
    """A tqdm bar on standard error, or its lines where that is no terminal."""
    if sys.stderr.isatty():
        return tqdm(desc=description, total=total, mininterval=BAR_SECONDS)
    count = "{n_fmt}" if total is None else "{n_fmt}/{total_fmt}"
    return tqdm(
        desc=description,
        total=total,
        mininterval=LINE_SECONDS,
        maxinterval=LINE_SECONDS,
        file=LineWriter(sys.stderr),
        bar_format=f"{{desc}}: {count} after {{elapsed}}, {{rate_fmt}}{{postfix}}",
    )
