"""The limit of open files, and how many of them are left for the connections of clients."""

from __future__ import annotations

import resource

import structlog

from service.settings import ServerSettings

RESERVED_FILES = 160
"""Files that are not for clients: log, libraries, event loop, store, listening sockets, refused connections."""
FILES_PER_ENGINE = 8
MIN_CONNECTIONS = 16
MAX_CONNECTIONS = 10_000
"""Bounds of the limit that is derived from the file limit."""

_log = structlog.get_logger("forerun.connections")


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard one, for this process and those it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        _log.warning("the limit of open files stays as it is", limit=soft, reason=str(error))


def connection_limit(settings: ServerSettings, num_engines: int) -> int:
    """Most client connections at a time: as set, else what the file limit leaves beside the service's own files."""
    if settings.max_connections is not None:
        return settings.max_connections
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    room = num_files - RESERVED_FILES - FILES_PER_ENGINE * num_engines
    return min(max(room, MIN_CONNECTIONS), MAX_CONNECTIONS)
