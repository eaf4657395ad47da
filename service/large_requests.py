"""Large requests: parsed and tokenized in a process of their own, so that they delay nothing else in the front.

A request is large above `SMALL_BODY_BYTES`; parsing a smaller one takes the front a millisecond.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from service.background import start_task
from service.errors import ApiError
from service.large_request_messages import Failed, FromWorker, Load, Parse, Parsed, Refused, Tokenized
from speculation.framing import FrameReader, encode_frame

IDLE_SECONDS = 60.0
"""Time without large requests after which the process ends. Starting it takes about half a second."""
PARSE_SECONDS = 60.0
"""Longest time for one request, the start of the process included; a process that takes longer is killed."""
READ_BYTES = 256 * 1024
COMMAND = (sys.executable, "-m", "service.large_request_worker")

_log = structlog.get_logger("forerun.large_requests")


@dataclass(order=True)
class WaitingRequest:
    """A request in the queue, ordered by size."""

    num_bytes: int
    number: int
    """Order of arrival."""
    message: Parse = field(compare=False)
    pieces: Sequence[bytes] | None = field(compare=False)
    """The body; None once the client has left."""
    answer: asyncio.Future[FromWorker] = field(compare=False)


class LargeRequests:
    """Queue in front of the process, the smallest request first. The process runs while there is work for it."""

    def __init__(self) -> None:
        self._queue: asyncio.PriorityQueue[WaitingRequest] = asyncio.PriorityQueue()
        self._numbers = itertools.count()
        self._task: asyncio.Task[None] | None = None
        self._load: Load | None = None

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, those of clients that have left among them."""
        return self._queue.qsize()

    async def parse(self, message: Parse, pieces: Sequence[bytes], load: Load) -> FromWorker:
        """The process's answer to `message` and the body in `pieces`; `load` is for a process that has to be started.

        Raises `ApiError` (503) if the process could not be started, died, or took longer than `PARSE_SECONDS`.
        """
        answer: asyncio.Future[FromWorker] = asyncio.get_running_loop().create_future()
        waiting = WaitingRequest(message.num_bytes, next(self._numbers), message, pieces, answer)
        self._load = load
        self._queue.put_nowait(waiting)
        if self._task is None:
            self._task = start_task("large requests", self._run())
        try:
            return await answer
        finally:
            waiting.pieces = None

    async def close(self) -> None:
        """End the process. Requests that wait are not answered."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            await self._answer_until_idle(await self._queue.get())

    async def _answer_until_idle(self, waiting: WaitingRequest | None) -> None:
        """Answer requests from one process, until none comes for `IDLE_SECONDS` or one fails."""
        assert self._load is not None
        process = _Process(self._load)
        try:
            while waiting is not None:
                if waiting.pieces is not None:
                    answer = await process.answer(waiting.message, waiting.pieces)
                    if not waiting.answer.done():
                        waiting.answer.set_result(answer)
                waiting = await self._next()
        except Exception as error:  # noqa: BLE001 - the next request gets a process of its own
            reason = "it took too long" if isinstance(error, TimeoutError) else repr(error)
            _log.error("the process for large requests failed", reason=reason, pid=process.pid)
            if waiting is not None and not waiting.answer.done():
                message = "the process that reads large requests failed; try again"
                waiting.answer.set_exception(ApiError.unavailable(message, "large_request_failed"))
        finally:
            await process.end()

    async def _next(self) -> WaitingRequest | None:
        """The smallest request that waits; None if none comes for `IDLE_SECONDS`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(IDLE_SECONDS):
                return await self._queue.get()
        return None


def parsed(answer: FromWorker) -> Parsed:
    """The request of an answer. Raises the `ApiError` that the client gets in its place."""
    found = answered(answer)
    assert isinstance(found, Parsed)
    return found


def answered(answer: FromWorker) -> Parsed | Tokenized:
    """An answer that is no error. Raises the `ApiError` that the client gets for one."""
    match answer:
        case Refused(status=status, error=error):
            raise ApiError(status, error.message, type=error.type, param=error.param, code=error.code)
        case Failed(traceback=traceback, is_memory_error=is_memory_error):
            _log.error("large request failed", traceback=traceback)
            raise ApiError.of(MemoryError() if is_memory_error else RuntimeError())
        case Parsed() | Tokenized():
            return answer


class _Process:
    """One `service.large_request_worker`, started by the first request."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._process: asyncio.subprocess.Process | None = None
        self._socket: socket.socket | None = None
        self._frames = FrameReader[FromWorker](FromWorker)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def answer(self, message: Parse, pieces: Sequence[bytes]) -> FromWorker:
        """The answer to one request, the process being started for it if need be.

        Raises OSError, TimeoutError or `FramingError`, after which the process is of no further use.
        """
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(PARSE_SECONDS):
            connection = self._socket or await self._start()
            for piece in (encode_frame(message), *pieces):
                await loop.sock_sendall(connection, piece)
            while data := await loop.sock_recv(connection, READ_BYTES):
                for answer in self._frames.feed(data):
                    return answer
        raise ConnectionError("it ended")

    async def end(self) -> None:
        """Kill it, if it runs, and wait until it is gone."""
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
            await self._process.wait()

    async def _start(self) -> socket.socket:
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        with theirs:
            # In a session of its own, so that a signal from the terminal reaches the front alone.
            self._process = await asyncio.create_subprocess_exec(
                *COMMAND, stdin=theirs.fileno(), start_new_session=True
            )
        await asyncio.get_running_loop().sock_sendall(self._socket, encode_frame(self._load))
        return self._socket
