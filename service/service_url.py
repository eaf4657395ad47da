"""The address of a running service, for the commands that talk to one."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from service.api_key import add_key_flags

URL_VARIABLE = "FORERUN_URL"
DEFAULT_URL = "http://127.0.0.1:8000"


def add_service_flags(parser: argparse.ArgumentParser, *, is_repeated: bool = False) -> None:
    """The flags that say which service a command talks to, and with which key.

    `is_repeated`: the parser is a subcommand's, and the command in front of it has taken the same flags already.
    """
    default = argparse.SUPPRESS if is_repeated else None
    parser.add_argument(
        "--url",
        default=default,
        help=f"address of the service, with or without scheme and /v1 (default: {URL_VARIABLE}, else {DEFAULT_URL})",
    )
    add_key_flags(parser, default)


def service_url(given: str | None, environment: Mapping[str, str]) -> str:
    """The address as `http://host:port`: of the flag, else of the variable, else the default.

    A missing scheme is http. A slash or `/v1` at the end, which other clients want, is left out.
    """
    url = (given or environment.get(URL_VARIABLE) or DEFAULT_URL).strip()
    if "://" not in url:
        url = f"http://{url}"
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
