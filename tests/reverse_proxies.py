"""nginx and HAProxy, which the tests put in front of a service: from Debian's packages `nginx-light` and `haproxy`.

`python -m tests.reverse_proxies` prints the programs that would be used, and exits with 1 if one is missing.
"""

from __future__ import annotations

import os
import shutil
import sys

PROGRAMS = ("nginx", "haproxy")


def find_program(name: str) -> str | None:
    """The program, or None where it is not installed. Packages put it where only root's PATH leads."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


if __name__ == "__main__":
    found = [find_program(name) for name in PROGRAMS]
    for name, path in zip(PROGRAMS, found, strict=True):
        sys.stdout.write(f"{path or f'no {name} found'}\n")
    sys.exit(None in found)
