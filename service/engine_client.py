"""The engine as handlers see it: sequences go in, their outputs come out, and leaving a request aborts it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from speculation.messages import (
    Abort,
    Command,
    Drain,
    Ready,
    Rejected,
    SequenceOutput,
    Stats,
    StepOutputs,
    Submit,
)

Send = Callable[[Command], None]


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


class OutputStream:
    """The outputs of the sequences of one request, and the request's life: leaving the context aborts what still runs.

    What arrives while nobody looks is kept until it is taken, all at once; that is bounded by the `max_tokens` of its
    sequences, and a slow reader therefore holds back neither the engine nor other requests.
    """

    def __init__(self, client: EngineClient, submits: Sequence[Submit]) -> None:
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
        self._client.open(self, self._submits)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for request_id in self._running:
            self._client.forget(request_id)
        self._running.clear()

    @property
    def is_finished(self) -> bool:
        """Whether every sequence has ended and every output was taken."""
        return not self._running and not self._arrived

    async def take(self) -> list[SequenceOutput]:
        """Every output that has arrived and was not taken, in order; waits for at least one.

        Raises `EngineUnavailableError` if the engine died, `EngineRejectedError` if it refused a sequence.
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


class EngineClient:
    """The front's end of one engine: who waits for which sequence's outputs.

    `attach` and `detach` follow the life of the engine process; between them, and while nothing is attached,
    everybody who waits is told.
    """

    def __init__(self, on_stats: Callable[[Stats], None], on_gap: Callable[[float], object]) -> None:
        """`on_gap` is told the seconds between two outputs of a sequence."""
        self.ready: Ready | None = None
        self._on_stats = on_stats
        self._on_gap = on_gap
        self._send: Send | None = None
        self._streams: dict[str, OutputStream] = {}

    @property
    def num_live(self) -> int:
        """Sequences that were submitted and have not ended: waiting or running."""
        return len(self._streams)

    def attach(self, ready: Ready, send: Send) -> None:
        """An engine serves; commands for it go to `send`."""
        self.ready, self._send = ready, send

    def detach(self, error: EngineUnavailableError) -> None:
        """The engine is gone; everybody who waits for it gets `error`."""
        self.ready = self._send = None
        self._fail_all(error)

    def submit(self, submits: Sequence[Submit]) -> OutputStream:
        """The outputs of one request's sequences. Entering the context submits them."""
        return OutputStream(self, submits)

    def open(self, stream: OutputStream, submits: Sequence[Submit]) -> None:
        """Send a stream's sequences. Raises `EngineUnavailableError` if no engine serves."""
        if self._send is None:
            raise EngineUnavailableError("the engine is not ready; try again shortly", "engine_not_ready")
        for submit in submits:
            self._streams[submit.request_id] = stream
            self._send(submit)

    def abort(self, request_id: str) -> None:
        """Ask the engine to end a sequence."""
        if self._send is not None:
            self._send(Abort(request_id))

    def forget(self, request_id: str) -> None:
        """Nobody waits for this sequence any more: end it, and drop what still comes of it."""
        if self._streams.pop(request_id, None) is not None:
            self.abort(request_id)

    def drain(self) -> None:
        """Ask the engine to exit when its last sequence has ended."""
        if self._send is not None:
            self._send(Drain())

    def end_all(self, error: EngineUnavailableError) -> None:
        """Abort every sequence; everybody who waits gets `error`."""
        for request_id in self._streams:
            self.abort(request_id)
        self._fail_all(error)

    def _fail_all(self, error: EngineUnavailableError) -> None:
        streams, self._streams = self._streams, {}
        for stream in {id(stream): stream for stream in streams.values()}.values():
            stream.fail(error)

    def dispatch(self, event: StepOutputs | Rejected | Stats) -> None:
        """Hand an event of the engine to who waits for it."""
        match event:
            case StepOutputs():
                for output in event.outputs:
                    self._deliver(output)
            case Rejected():
                stream = self._streams.pop(event.request_id, None)
                if stream is not None:
                    stream.fail(EngineRejectedError(event))
            case Stats():
                self._on_stats(event)

    def _deliver(self, output: SequenceOutput) -> None:
        stream = self._streams.get(output.request_id)
        if stream is None:
            return
        if output.finish_reason is not None:
            del self._streams[output.request_id]
        gap = stream.put(output)
        if gap is not None:
            self._on_gap(gap)
