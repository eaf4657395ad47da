"""The engine process's loop over a socket: what a peer may send, and how what is long is sent back."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from speculation import framing
from speculation.framing import FrameReader, encode_frame
from speculation.messages import (
    Abort,
    Drain,
    Event,
    Prefer,
    Rejected,
    SamplingParams,
    SequenceOutput,
    StepOutputs,
    Submit,
)
from speculation.worker import Worker
from tests.speculation.running import engine_with, plain_loop, request_of


@contextmanager
def running_worker() -> Iterator[tuple[socket.socket, Iterator[Event]]]:
    """A worker with an engine of integers in a thread, the front's end of its socket, and the events it sends."""
    front, connection = socket.socketpair()
    worker = Worker(connection, engine_with(), check_invariants=True, heartbeat_seconds=3600.0)
    thread = threading.Thread(target=worker.run)
    thread.start()
    front.settimeout(60)
    try:
        yield front, _events(front)
    finally:
        front.sendall(encode_frame(Drain()))
        thread.join(60)
        front.close()
        connection.close()


def _events(front: socket.socket) -> Iterator[Event]:
    reader: FrameReader[Event] = FrameReader(Event)
    while data := front.recv(1 << 16):
        yield from reader.feed(data)


WRONG: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"logit_bias": {10_000_000: 1.0}}, {}),
    ({"logprobs": 1_000_000}, {}),
    ({"max_tokens": 2}, {"output_token_ids": [1, 2, 3]}),
    ({"temperature": math.nan}, {}),
    ({"top_p": math.nan}, {}),
    ({"temperature": -1.0}, {}),
    ({"top_k": 2**64 - 1}, {}),
    ({"stop_token_ids": (2**63,)}, {}),
    ({}, {"prediction_token_ids": [2**63]}),
    ({}, {"prompt_logprobs": 1_000_000}),
    ({}, {"priority": -(2**63)}),
]


def test_a_worker_survives_what_a_peer_sends() -> None:
    """Each wrong submit is rejected by name, and what is asked before and after it is answered as by a plain loop."""
    right = [request_of(str(i), [1, 2, 3 + i], max_tokens=10, temperature=1.0, seed=i) for i in range(2)]
    wrong = [
        Submit(request_id=f"wrong-{i}", prompt_token_ids=[1], sampling=SamplingParams(**sampling), **fields)
        for i, (sampling, fields) in enumerate(WRONG)
    ]
    others = [Abort("nobody"), Prefer([b"", b"x" * 1000])]
    tokens: dict[str, list[int]] = {"0": [], "1": []}
    rejected: set[str] = set()
    num_finished = 0
    with running_worker() as (front, events):
        front.sendall(b"".join(map(encode_frame, [right[0], *wrong, *others, right[1]])))
        for event in events:
            if isinstance(event, Rejected):
                assert (event.code, bool(event.param)) == ("invalid", True)
                rejected.add(event.request_id)
            elif isinstance(event, StepOutputs):
                for output in event.outputs:
                    tokens[output.request_id] += output.token_ids
                    num_finished += output.finish_reason is not None
            if num_finished == 2 and len(rejected) == len(wrong):
                break
    assert rejected == {request.request_id for request in wrong}
    assert [tokens["0"], tokens["1"]] == [plain_loop(request) for request in right]


def test_outputs_that_do_not_fit_in_one_frame_are_sent_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose outputs are too long together reaches the front whole and in order, in more than one message."""
    monkeypatch.setattr("speculation.framing.MAX_FRAME_BYTES", 500)
    front, connection = socket.socketpair()
    worker = Worker(connection, engine_with(), check_invariants=False, heartbeat_seconds=3600.0)
    outputs = [SequenceOutput(request_id=str(i), token_ids=[i] * 100) for i in range(7)]
    worker._send_outputs(outputs)
    connection.close()
    received = list(_events(front))
    front.close()
    assert len(received) > 1
    assert [output for event in received if isinstance(event, StepOutputs) for output in event.outputs] == outputs


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
    """The one of three outputs that does not fit in a frame is refused with a reason; the others arrive."""
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


def test_warnings_of_libraries_are_json_lines() -> None:
    """What target and draft log by the standard library is a line of JSON with level, event and logger."""
    code = (
        "import logging\n"
        "from speculation.worker import configure_logs\n"
        "configure_logs('info', 'json')\n"
        "log = logging.getLogger('target.native.kept_code')\n"
        "log.debug('not shown')\n"
        "log.warning('the folder %s is %d %% full', '/x', 100)\n"
        "log.log(35, 'a level of its own')\n"
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    log.exception('failed')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(line["level"], line["event"]) for line in lines] == [
        ("warning", "the folder /x is 100 % full"),
        ("warning", "a level of its own"),
        ("error", "failed"),
    ]
    assert {line["logger"] for line in lines} == {"target.native.kept_code"}
    assert "ZeroDivisionError" in lines[2]["exception"]
