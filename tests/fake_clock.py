"""Another time of day for a process of a test, set while it runs: libfaketime, from Debian's package `faketime`.

`python -m tests.fake_clock` prints the library that would be used, and exits with 1 if there is none.
"""

from __future__ import annotations

import sys
from pathlib import Path


def find_library() -> str | None:
    """The library to preload, or None where the package is not installed."""
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    return str(found[0]) if found else None


class FakeClock:
    """Moves the wall clock of the processes started with `environment`; their monotonic clocks stay true."""

    def __init__(self, file: Path) -> None:
        """`file` holds the offset, and is read by those processes again and again. Raises RuntimeError without it."""
        library = find_library()
        if library is None:
            raise RuntimeError("no libfaketime: apt-get install faketime")
        self._file = file
        self.step(0)
        self.environment = {
            "LD_PRELOAD": library,
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def step(self, seconds: int) -> None:
        """Set how far the clock is ahead of the true one."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{seconds:+d}\n")
        new.replace(self._file)


if __name__ == "__main__":
    library = find_library()
    print(library or "no libfaketime found", file=sys.stdout if library else sys.stderr)
    sys.exit(library is None)
