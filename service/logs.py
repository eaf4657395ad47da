"""Logs: one event a line on standard error, with the id of the request it belongs to."""

from __future__ import annotations

import logging
import re
import sys
from typing import Any

import structlog

from speculation.log_format import LogFormat, line_processors

_KEY = re.compile(r"""(bearer(?:\s|\\+t)+|forerun\.key\.)(?:\\.|[^\s"\\])+""", re.IGNORECASE)
"""An API key, as a header or a subprotocol has it, in a log line."""


def configure_logs(level: str, log_format: LogFormat) -> None:
    """Send structlog's and the standard library's logs the same way. Once, at start."""
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            *line_processors(log_format),
            hide_keys,
        ],
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(renderer)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    # It warns of a client's subprotocols, one of which may be a key.
    logging.getLogger("aiohttp.websocket").setLevel(logging.ERROR)


def hide_keys(_: Any, __: str, line: Any) -> Any:
    """Processor of a rendered line: whatever it came from, no API key stands in it."""
    return _KEY.sub(r"\1(hidden)", line) if isinstance(line, str) else line
