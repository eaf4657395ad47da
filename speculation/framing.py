"""How messages travel over the socket between the front and an engine: both sides, and tests, use this file.

A frame is a 4-byte little-endian length and so many bytes of MessagePack, one tagged message: of
`speculation.messages`, but for the first few between machines.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO, Generic, TypeVar

import msgspec

MAX_FRAME_BYTES = 64 * 1024 * 1024
"""No message is longer: a longer announced length means that the two sides have lost step."""
MAX_REASON = 200
"""Most characters that an error repeats of why a frame is no message: it may quote the frame."""

MessageT = TypeVar("MessageT")

_LENGTH = struct.Struct("<I")
_ENCODER = msgspec.msgpack.Encoder()


class FramingError(ValueError):
    """Bytes that are no frame, so that the connection is of no further use; or a message that no frame can hold."""


def encode_frame(message: msgspec.Struct) -> bytes:
    """One message, ready for the socket. Raises `FramingError` if it is too long, or no MessagePack can hold it."""
    try:
        payload = _ENCODER.encode(message)
    except (ValueError, OverflowError, TypeError, RecursionError) as error:
        raise FramingError(f"a {type(message).__name__} cannot be encoded: {error}") from error
    if len(payload) > MAX_FRAME_BYTES:
        raise FramingError(f"a {type(message).__name__} of {len(payload)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(payload)) + payload


def read_frame(stream: BinaryIO, decoder: msgspec.msgpack.Decoder[MessageT]) -> MessageT | None:
    """The next message of a blocking stream, and no byte behind it; None at the end of the stream.

    For a peer that is trusted: raises what `decoder` raises.
    """
    header = stream.read(_LENGTH.size)
    return decoder.decode(stream.read(*_LENGTH.unpack(header))) if header else None


class FrameReader(Generic[MessageT]):
    """Cuts a stream of bytes into messages of one direction; reads no socket itself.

    `FrameReader[Command](Command)` in an engine, `FrameReader[Event](Event)` in a front.
    """

    def __init__(self, message_type: object, *, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_bytes = max_bytes
        self._decoder: msgspec.msgpack.Decoder[MessageT] = msgspec.msgpack.Decoder(message_type)
        self._buffer = bytearray()

    @property
    def is_within_frame(self) -> bool:
        """Whether a frame has begun and not ended: at the end of the stream, that something was cut off."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> Iterator[MessageT]:
        """Every message that `data` completes, in order. Raises `FramingError` on bytes that are no message."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._buffer, start)
                if length > self._max_bytes:
                    raise FramingError(f"a frame announces {length} bytes; the limit is {self._max_bytes}")
                end = start + _LENGTH.size + length
                if len(self._buffer) < end:
                    return
                payload = bytes(self._buffer[start + _LENGTH.size : end])
                start = end
                yield self._decode(payload)
        finally:
            del self._buffer[:start]

    def _decode(self, payload: bytes) -> MessageT:
        try:
            return self._decoder.decode(payload)
        except (ValueError, OverflowError, RecursionError) as error:  # the last for a value nested too deeply
            raise FramingError(f"a frame of {len(payload)} bytes is no message: {str(error)[:MAX_REASON]}") from error
