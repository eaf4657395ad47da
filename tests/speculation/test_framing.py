"""Frames between the front and an engine."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculation.framing import MAX_FRAME_BYTES, FrameReader, FramingError, encode_frame
from speculation.messages import Abort, Command, Drain, SamplingParams, Submit

COMMANDS: list[Command] = [
    Submit(request_id="a", prompt_token_ids=[1, 2, 3], sampling=SamplingParams(seed=2**64 - 1)),
    Abort("a"),
    Drain(),
]


def frame_of(payload: bytes) -> bytes:
    return struct.pack("<I", len(payload)) + payload


@given(st.lists(st.integers(min_value=1, max_value=40)))
def test_messages_survive_any_cut_of_the_stream(cuts: list[int]) -> None:
    """However the bytes arrive in pieces, the same messages come out in order and nothing is left over."""
    stream = b"".join(map(encode_frame, COMMANDS))
    reader = FrameReader[Command](Command)
    received: list[object] = []
    start = 0
    for size in [*cuts, len(stream)]:
        received += reader.feed(stream[start : start + size])
        start += size
    assert received == COMMANDS
    assert not reader.is_within_frame


def test_an_unfinished_frame_is_noticed() -> None:
    """A stream that ends within a frame is told apart from one that ends between two."""
    reader = FrameReader[Command](Command)
    assert list(reader.feed(encode_frame(Drain())[:-1])) == []
    assert reader.is_within_frame


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (struct.pack("<I", MAX_FRAME_BYTES + 1), "announces"),
        (struct.pack("<I", 1) + b"\xc1", "no message"),
        (struct.pack("<I", 4) + b"\x81\xa1a\x01", "no message"),
        (frame_of(b"\x82\xa4type\xa5abort\xa1x" + b"\x91" * 100_000 + b"\x01"), "no message"),
        (frame_of(b"\x82\xa4type\xa6submit\xb0prompt_token_ids\xdd\xff\xff\xff\xff"), "no message"),
        (frame_of(b"\x82\xa4type\xa5abort\xaarequest_id\xa1\xff"), "no message"),
    ],
)
def test_bytes_that_are_no_message_are_an_error(data: bytes, says: str) -> None:
    """An absurd length, broken or bottomless MessagePack and an unknown message are named, not waited for."""
    with pytest.raises(FramingError, match=says):
        list(FrameReader[Command](Command).feed(data))


def test_an_error_does_not_repeat_a_frame() -> None:
    """What an error says of a frame is short, however long the value that it quotes."""
    with pytest.raises(FramingError, match="no message") as caught:
        list(FrameReader[Command](Command).feed(frame_of(msgspec.msgpack.encode({"type": "x" * 1_000_000}))))
    assert len(str(caught.value)) < 400
