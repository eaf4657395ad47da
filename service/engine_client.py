"""The engines as handlers see them: sequences go in, their outputs come out, and leaving a request aborts it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from speculation.messages import Rejected, SequenceOutput, Submit


class EngineUnavailableError(Exception):
    """No engine serves, or the one that did has died; `code` says which."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class EngineRejectedError(Exception):
    """The engine will not take a sequence."""

    def __init__(self, rejected: Rejected) -> None:
        super().__init__(rejected.message)
        self.rejected = rejected


class EngineClient(Protocol):
    """Whoever runs sequences and passes their outputs to their streams."""

    async def open(self, stream: OutputStream, submits: Sequence[Submit]) -> None:
        """Run a stream's sequences.

        Raises `EngineUnavailableError` if no engine serves, `EngineRejectedError` for a sequence that cannot be sent.
        """
        ...

    def abort(self, request_id: str) -> None:
        """End a sequence; its last output still comes."""
        ...

    def forget(self, request_id: str) -> None:
        """Nobody waits for this sequence any more: end it, and drop what still comes of it."""
        ...


class OutputStream:
    """The outputs of the sequences of one request, and the request's life: leaving the context aborts what still runs.

    What arrives while nobody looks is kept until it is taken, all at once; that is bounded by the `max_tokens` of its
    sequences, and a slow reader therefore holds back neither the engine nor other requests.
    """

    def __init__(self, client: EngineClient, submits: Sequence[Submit], *, is_internal: bool = False) -> None:
        """`is_internal`: nobody asked for it but the service itself, so that it says nothing of what users see."""
        self.is_internal = is_internal
        self.submitted_at = time.perf_counter()
        self.first_output_at: float | None = None
        """When the first tokens arrived here, by `time.perf_counter`."""
        self.last_output_at: float = self.submitted_at
        self._client = client
        self._submits = submits
        self._running = {submit.request_id for submit in submits}
        self._last_at: dict[str, float] = {}
        self._arrived: list[SequenceOutput] = []
        self._error: Exception | None = None
        self._wake = asyncio.Event()

    async def __aenter__(self) -> Self:
        try:
            await self._client.open(self, self._submits)
        except BaseException:
            # `__aexit__` does not run for a context that was never entered.
            self._forget()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._forget()

    @property
    def is_finished(self) -> bool:
        """Whether every sequence has ended and every output was taken."""
        return not self._running and not self._arrived

    async def take(self) -> list[SequenceOutput]:
        """Every output that has arrived and was not taken, in order; waits for at least one.

        Raises `EngineUnavailableError` if no engine can go on, `EngineRejectedError` if it refused a sequence.
        """
        while not self._arrived and self._error is None:
            self._wake.clear()
            await self._wake.wait()
        if not self._arrived and self._error is not None:
            raise self._error
        taken, self._arrived = self._arrived, []
        return taken

    def abort(self, request_id: str) -> None:
        """Ask the engine to end one sequence; its last output still comes, with the reason "abort"."""
        if request_id in self._running:
            self._client.abort(request_id)

    def put(self, output: SequenceOutput) -> float | None:
        """An output has arrived. Returns the seconds since the same sequence's last one, if there was one."""
        now = self.last_output_at = time.perf_counter()
        if self.first_output_at is None:
            self.first_output_at = now
        before = self._last_at.get(output.request_id)
        self._last_at[output.request_id] = now
        if output.finish_reason is not None:
            self._running.discard(output.request_id)
        self._arrived.append(output)
        self._wake.set()
        return None if before is None else now - before

    def fail(self, error: Exception) -> None:
        self._error = error
        self._wake.set()

    def _forget(self) -> None:
        for request_id in self._running:
            self._client.forget(request_id)
        self._running.clear()
