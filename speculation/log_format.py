"""Form of log lines, the same for every process: for people on a terminal, else JSON."""

from __future__ import annotations

import sys
from typing import Any, Literal

import structlog

LogFormat = Literal["auto", "json", "console"]
FIRST_KEYS = ("timestamp", "level", "logger", "event")


def is_console(log_format: LogFormat) -> bool:
    """Whether lines are for people: as the setting says, or where standard error is a terminal."""
    return log_format == "console" or (log_format == "auto" and sys.stderr.isatty())


def line_processors(log_format: LogFormat) -> list[Any]:
    """structlog processors that turn an event into its line. Tracebacks show no values: those may hold prompts."""
    if is_console(log_format):
        colors = sys.stderr.isatty()
        return [structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)]
    return [structlog.processors.format_exc_info, first_keys_first, structlog.processors.JSONRenderer()]


def first_keys_first(_: Any, __: str, event: Any) -> Any:
    """Processor that puts time, level, logger and event before the other keys."""
    return {key: event[key] for key in FIRST_KEYS if key in event} | dict(event)
