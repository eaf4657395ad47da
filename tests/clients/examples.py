"""The examples of a page in docs/: fenced code under a title."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Example:
    """One fenced block."""

    title: str
    """Of the section it is in."""
    language: str
    code: str


def examples(page: Path) -> list[Example]:
    """All fenced blocks of a Markdown page, in their order."""
    found, title = [], ""
    for match in re.finditer(r"^#+ ([^\n]+)$|^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        if match[1] is not None:
            title = match[1]
        else:
            found.append(Example(title, match[2], match[3]))
    return found
