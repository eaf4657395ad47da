"""The API key that a command sends to a service that wants one."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

API_KEY_VARIABLE = "FORERUN_API_KEY"


class ApiKeyError(Exception):
    """A key that cannot be read or sent. The message names where it came from, and never the key."""


def add_key_flags(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """The flags that `key_of` reads, with `default` where they are not given."""
    flags = parser.add_mutually_exclusive_group()
    flags.add_argument(
        "--api-key",
        metavar="KEY",
        default=default,
        help=f"API key, where the service asks for one (default: the variable {API_KEY_VARIABLE})",
    )
    flags.add_argument(
        "--api-key-file",
        metavar="FILE",
        default=default,
        help="file that holds the API key, which then stands in no process list",
    )


def key_of(chosen: argparse.Namespace, environment: Mapping[str, str]) -> str | None:
    """The key of the flags, else of the variable, else None. Raises `ApiKeyError`."""
    if chosen.api_key_file is not None:
        source = f"--api-key-file {chosen.api_key_file}"
        try:
            key = Path(chosen.api_key_file).expanduser().read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ApiKeyError(f"{source}: {error}") from error
    elif chosen.api_key is not None:
        source, key = "--api-key", chosen.api_key
    elif environment.get(API_KEY_VARIABLE):
        source, key = API_KEY_VARIABLE, environment[API_KEY_VARIABLE]
    else:
        return None
    words: list[str] = key.split()
    if len(words) != 1 or not words[0].isprintable():
        raise ApiKeyError(f"{source} holds {'no key' if not words else 'what is no key'}; a key is one word")
    return words[0]


def authorization(key: str | None) -> dict[str, str]:
    """The headers that say it."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}
