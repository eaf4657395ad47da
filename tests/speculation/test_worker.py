"""What the worker does with messages that do not fit in a frame, and with errors of the thread that reads."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from speculation import framing
from speculation.framing import FrameReader
from speculation.messages import Abort, Event, Rejected, SequenceOutput, StepOutputs
from speculation.worker import Worker


@pytest.fixture
def pair() -> Iterator[tuple[Worker, socket.socket]]:
    """A worker without an engine, and the front's end of its connection."""
    ours, theirs = socket.socketpair()
    engine: Any = SimpleNamespace()
    yield Worker(theirs, engine, check_invariants=False, heartbeat_seconds=600), ours
    ours.close()
    theirs.close()


def test_an_output_that_is_too_long_ends_its_sequence_alone(
    pair: tuple[Worker, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three outputs of a step one does not fit in a frame: it is refused with a reason, the others arrive."""
    worker, front = pair
    monkeypatch.setattr(framing, "MAX_FRAME_BYTES", 1000)
    outputs = [SequenceOutput(request_id=name, token_ids=[1] * count) for name, count in (("a", 9), ("b", 2000))]
    worker._send_outputs([*outputs, SequenceOutput(request_id="c", token_ids=[1])])
    events = list(FrameReader[Event](Event).feed(front.recv(1 << 16)))
    refusal = events.pop(1)
    assert isinstance(refusal, Rejected)
    assert (refusal.request_id, refusal.code) == ("b", "invalid")
    assert "over the limit of 1000; ask for fewer" in refusal.message.replace(")", "")
    assert [event.outputs[0].request_id for event in events if isinstance(event, StepOutputs)] == ["a", "c"]
    assert worker._commands.get_nowait() == Abort("b")


def test_an_error_of_the_reading_thread_ends_the_engine(
    pair: tuple[Worker, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that can hear nothing any more ends, instead of saying for ever that it lives."""
    worker, front = pair

    def fail(self: object, data: bytes) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(FrameReader, "feed", fail)
    front.sendall(b"x")
    with pytest.raises(RuntimeError, match="a mistake"):
        worker._read()
    assert worker._commands.get_nowait() is None
