"""Phases of a start: what the engine says it does while it loads, which the first time takes half a minute and more."""

from __future__ import annotations

import logging

LOGGER_NAME = "forerun.start"
"""Logger of the phases. Whoever starts an engine may give it a handler; without one nothing is said."""
_logger = logging.getLogger(LOGGER_NAME)


def begin(phase: str) -> None:
    """Say what is done now, in words that go on with "…": "compiling for this processor, once"."""
    _logger.info(phase)
