"""Recorded sequences: token ids alone, one a line of a JSON-lines file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec


class Recording(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One recorded sequence, a line of the log. Further fields are ignored."""

    prompt_token_ids: list[int]
    output_token_ids: list[int]
    prediction_token_ids: list[int] = []
    cache_salt: str = ""
    """Sequences with different ones do not learn of each other; anything that tells them apart will do."""
    temperature: float = 0.0


def read_log(path: Path) -> Iterator[Recording]:
    """The sequences of a log, in its order. Raises ValueError naming file and line of a bad one.

    The log may be in use: half a line at its end is one that is being written, and not read yet.
    """
    decoder = msgspec.json.Decoder(Recording)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield decoder.decode(line)
                except msgspec.DecodeError as error:
                    if not line.endswith(b"\n"):
                        return
                    raise ValueError(
                        f"{path}, line {number}: {error}; a line is "
                        '{"prompt_token_ids": [...], "output_token_ids": [...]}'
                    ) from error
