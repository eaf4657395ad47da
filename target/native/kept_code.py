"""Machine code on disk, checked before it is used: who owns it, who may change it, and whether it is whole.

Numba's own files are pickles that are loaded unchecked: a truncated one ends the process, and one that somebody else
wrote runs their code. Here a file is a digest and a pickle, and whatever is wrong with it costs a compilation.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import pickle
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from numba.core.caching import FunctionCache, NullCache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

DIGEST_BYTES = 32
SUFFIX = ".code"
FOLDER_NAME = re.compile(r"[0-9a-f]{16}")
"""How folders of code are called: by a digest of the sources."""
UNUSED_SECONDS = 30 * 24 * 3600
"""After so long without use, code of other versions is removed."""

logger = logging.getLogger(__name__)


class CodeFolder:
    """A folder of compiled functions. It is made when something is kept, readable by its owner alone.

    Its first fault is logged with the folder and the remedy; afterwards it is silent, and functions that it cannot give
    are compiled into memory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_faulty = False

    def holds_code(self) -> bool:
        """Whether code of any function is here."""
        try:
            return any(self.path.glob(f"*{SUFFIX}"))
        except OSError:
            return False

    def mark_used(self) -> None:
        """Set the folder's time to now, by which another version sees that this one is in use."""
        with suppress(OSError):
            os.utime(self.path)

    def read(self, name: str) -> bytes | None:
        """The content kept under `name`; None where there is none. Raises ValueError, OSError where it is unusable."""
        try:
            self._require_private(self.path, self.path.stat())
            file = os.open(self.path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        with os.fdopen(file, "rb") as opened:
            self._require_private(self.path / name, os.fstat(opened.fileno()))
            kept = opened.read()
        content = kept[DIGEST_BYTES:]
        if kept[:DIGEST_BYTES] != _digest(name, content):
            raise ValueError(f"{name} is damaged")
        return content

    def write(self, name: str, content: bytes) -> None:
        """Keep `content` under `name`: whole, or not at all. Raises ValueError or OSError."""
        if not self.path.is_dir():
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._remove_unused_siblings()
        self._require_private(self.path, self.path.stat())
        file, temporary = tempfile.mkstemp(prefix=".", dir=self.path)
        try:
            with os.fdopen(file, "wb") as opened:
                opened.write(_digest(name, content) + content)
            Path(temporary).replace(self.path / name)
        except BaseException:
            Path(temporary).unlink()
            raise

    def _remove_unused_siblings(self) -> None:
        """Remove folders of other versions that nobody has used for 30 days; who still does compiles once more."""
        oldest = time.time() - UNUSED_SECONDS
        for path in self.path.parent.iterdir():
            with suppress(OSError):
                if FOLDER_NAME.fullmatch(path.name) and not path.is_symlink() and path.stat().st_mtime < oldest:
                    shutil.rmtree(path)

    def _require_private(self, path: Path, found: os.stat_result) -> None:
        """Raises ValueError for what another user owns or may change: reading code is running it."""
        if found.st_uid not in {os.geteuid(), 0}:
            raise ValueError(f"{path} belongs to user {found.st_uid}; it must belong to this user or to root")
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            mode = stat.S_IMODE(found.st_mode)
            raise ValueError(f"{path} can be changed by others (mode {mode:o}); `chmod go-w` makes it usable")

    def report(self, error: BaseException) -> None:
        """Log the first fault of this folder."""
        if not self._is_faulty:
            self._is_faulty = True
            logger.warning(
                "the folder of compiled code %s could not be used (%s: %s); functions that it cannot give are compiled "
                "again, and kept there where it can be written",
                self.path,
                type(error).__name__,
                error,
            )


@functools.cache
def code_folder(path: Path) -> CodeFolder:
    """One object a folder, so that it reports its fault once."""
    return CodeFolder(path)


class KeptCode(FunctionCache):  # type: ignore[misc]  # Numba has no types
    """What a Numba function asks for its compiled form and gives it to; never raises for what is on disk."""

    def __init__(self, function: Callable[..., object], folder: CodeFolder) -> None:
        # FunctionCache's own __init__ makes folders and reads files of Numba's layout.
        self._py_func = function
        self._folder = folder
        self._cache_path = str(folder.path)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compile result for a signature; None where it has to be compiled."""
        target_context.refresh()
        try:
            content = self._folder.read(self._name(sig, target_context.codegen()))
            if content is None:
                return None
            parts = pickle.loads(content)  # noqa: S301  written by this user or root, who alone may change it
            return CompileResult._rebuild(target_context, *parts)  # noqa: SLF001  as Numba's own cache does
        except Exception as error:  # noqa: BLE001  whatever is wrong with a file, the function can be compiled
            self._folder.report(error)
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep a compile result for the next process, unless it holds addresses of this one."""
        if data.library.has_dynamic_globals or any(not part.can_cache for part in data.lifted):
            return
        try:
            self._folder.write(self._name(sig, data.codegen), dumps(data._reduce()))  # noqa: SLF001
        except Exception as error:  # noqa: BLE001  the function is compiled already
            self._folder.report(error)

    def _name(self, sig: Any, codegen: Any) -> str:
        key = hashlib.sha256(repr(self._index_key(sig, codegen)).encode()).hexdigest()[:32]
        function = f"{self._py_func.__module__}.{self._py_func.__qualname__}".replace("<", "").replace(">", "")
        return f"{function}-{key}{SUFFIX}"


def cache_in(folder: CodeFolder | None, function: Callable[..., object]) -> Any:
    """The cache of a Numba function: `KeptCode`, or one that keeps nothing where there is no folder."""
    return NullCache() if folder is None else KeptCode(function, folder)


def _digest(name: str, content: bytes) -> bytes:
    """The name is part of it: a file renamed to another function's is not that function."""
    return hashlib.sha256(name.encode() + b"\0" + content).digest()
