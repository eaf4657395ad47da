"""Names of the files that a GGUF model is split into (llama.cpp's `gguf-split`)."""

from __future__ import annotations

import re
from pathlib import Path

from target.errors import CheckpointError

_PART = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")
MAX_NAMED = 3
"""Number of missing parts that an error names."""


def gguf_parts(path: Path) -> list[Path]:
    """The files of a GGUF model in order, from the name of any of them; `path` alone where its name is not a part's.

    Parts lie in one folder and are called NAME-00001-of-00003.gguf. Raises `CheckpointError` naming missing ones.
    """
    found = _PART.fullmatch(path.name)
    count = 0 if found is None else int(found["count"])
    if found is None or not 1 <= int(found["number"]) <= count:
        return [path]
    parts = [path.with_name(f"{found['stem']}-{i + 1:05}-of-{count:05}.gguf") for i in range(count)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        named = ", ".join(missing[:MAX_NAMED]) + (f" and {len(missing) - MAX_NAMED} more" * (len(missing) > MAX_NAMED))
        verb = "are" if len(missing) > 1 else "is"
        raise CheckpointError(
            f"{named} {verb} missing in {path.absolute().parent}; the model is split into {count} files, all of which "
            "must be there"
        )
    return parts


def gguf_stem(path: Path) -> str:
    """The name of a GGUF model's file without what says that it is one, or a part of one."""
    found = _PART.fullmatch(path.name)
    return path.stem if found is None else found["stem"]
