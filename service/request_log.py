"""The request log: token ids of finished requests, for `forerun simulate`, if an operator asks for it."""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import queue
import secrets
import stat
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
import structlog
from msgspec import Meta

from speculation.messages import SequenceOutput, Submit
from speculation.recording import Recording

MAX_WAITING = 256
"""Requests that wait to be written; when a disk is slower than that, further ones are left out."""
CLOSE_SECONDS = 2.0
"""How long what waits may take to be written at the end."""

_log = structlog.get_logger("forerun.request_log")


class RecordingSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Recording requests, for `forerun simulate`."""

    request_log: Annotated[
        str | None,
        Meta(description="file that finished requests are appended to, as token ids alone; without it none are"),
    ] = None
    request_log_bytes: Annotated[
        int,
        Meta(
            ge=1 << 16,
            description="most bytes of recorded requests: with half of it FILE becomes FILE.1, and what that was goes",
        ),
    ] = 256 * 1024**2


class Transcript:
    """What the sequences of one request say, while it is answered."""

    def __init__(self, submits: Sequence[Submit]) -> None:
        self._submits = submits
        self._token_ids: dict[str, list[int]] = {submit.request_id: [] for submit in submits}

    def add(self, output: SequenceOutput) -> None:
        """What the engine said of one of them."""
        self._token_ids[output.request_id] += output.token_ids

    def recordings(self) -> list[Recording]:
        """One a sequence."""
        return [
            Recording(
                prompt_token_ids=submit.prompt_token_ids,
                output_token_ids=self._token_ids[submit.request_id],
                prediction_token_ids=submit.prediction_token_ids,
                cache_salt=submit.cache_salt,
                temperature=submit.sampling.temperature,
            )
            for submit in self._submits
        ]


class LogFile:
    """Whole lines in a file that its owner alone may read, and its predecessor beside it under a bound."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Appends to what is there. Raises OSError; ValueError for what is no file, or another process's."""
        self._path = path
        self._most = max_bytes // 2
        self._descriptor = self._open()

    def append(self, line: bytes) -> None:
        """Write a line that ends with a newline, or nothing of it. Raises OSError, after which it can be tried again.

        A line that is longer than the bound allows is left out.
        """
        if len(line) > self._most:
            return
        if os.fstat(self._descriptor).st_size + len(line) > self._most:
            self._rotate()
        size, rest = os.fstat(self._descriptor).st_size, memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            # Half a line would spoil the one behind it.
            os.ftruncate(self._descriptor, size)
            raise

    def close(self) -> None:
        os.close(self._descriptor)

    def _open(self) -> int:
        descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ValueError("it must be a regular file")
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError("another process writes it; each service needs a file of its own") from error
            os.fchmod(descriptor, 0o600)
            os.ftruncate(descriptor, _end_of_lines(descriptor))
        except (OSError, ValueError):
            os.close(descriptor)
            raise
        return descriptor

    def _rotate(self) -> None:
        with suppress(FileNotFoundError):  # somebody has moved it away
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        full, self._descriptor = self._descriptor, self._open()
        os.close(full)


class RequestLog:
    """Records requests in a thread of its own: no request waits for a disk, and none fails with it.

    What cannot be written is left out, with one warning until something could be written again.
    """

    def __init__(self, path: str, max_bytes: int) -> None:
        """Raises ValueError, naming the setting, if the file cannot be written."""
        try:
            self._file = LogFile(Path(path).expanduser(), max_bytes)
        except (OSError, ValueError) as error:
            raise ValueError(f"request_log is {path!r}, which cannot be written: {error}") from error
        self._salt_key = secrets.token_bytes(16)
        self._waiting: queue.Queue[Transcript | None] = queue.Queue(MAX_WAITING)
        self._is_failing = False
        self._thread = threading.Thread(target=self._run, name="request log", daemon=True)
        self._thread.start()

    def keep(self, transcript: Transcript) -> None:
        """A request was answered to its end. Returns at once."""
        try:
            self._waiting.put_nowait(transcript)
        except queue.Full:
            self._warn(f"{MAX_WAITING} requests wait to be written")

    def close(self) -> None:
        """Write what waits, unless that takes long. Not to be called in an event loop."""
        with suppress(queue.Full):
            self._waiting.put(None, timeout=CLOSE_SECONDS)
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while (transcript := self._waiting.get()) is not None:
            try:
                for recording in transcript.recordings():
                    self._write(recording)
            except Exception as error:  # noqa: BLE001 - one request that cannot be written must not end the thread
                self._warn(f"{type(error).__name__}: {error}")
        self._file.close()

    def _write(self, recording: Recording) -> None:
        nameless = msgspec.structs.replace(recording, cache_salt=self._pseudonym(recording.cache_salt))
        try:
            self._file.append(msgspec.json.encode(nameless) + b"\n")
        except (OSError, ValueError) as error:
            self._warn(str(error))
            return
        if self._is_failing:
            self._is_failing = False
            _log.info("requests are recorded again")

    def _warn(self, reason: str) -> None:
        if not self._is_failing:
            self._is_failing = True
            _log.warning("requests are not recorded", reason=reason)

    def _pseudonym(self, salt: str) -> str:
        """What tells salts apart and says nothing of them: the key is never written."""
        return hashlib.blake2b(salt.encode(), key=self._salt_key, digest_size=8).hexdigest() if salt else ""


def _end_of_lines(descriptor: int) -> int:
    """Where the last whole line of a file ends: a power failure may have left half a one."""
    if not os.fstat(descriptor).st_size:
        return 0
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as content:
        return content.rfind(b"\n") + 1
