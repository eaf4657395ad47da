"""How a front and a stand-alone engine make sure of each other before a single command: a shared secret, both ways.

    engine ──► Hello(nonce)          front ──► Claim(nonce, HMAC("front", both nonces))
    engine ──► Welcome(HMAC("engine", both nonces))

HMAC-SHA-256 [RFC 2104] over fresh nonces: the secret itself never travels, and nothing that was overheard helps later.
It tells who connects, and hides nothing of what follows; where others can read or change what travels, use TLS.
Frames are as everywhere between front and engine, but small.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import struct
from typing import TypeVar

import msgspec

from speculation.framing import encode_frame

PROTOCOL = "forerun 1"
HANDSHAKE_SECONDS = 5.0
MAX_BYTES = 4096
"""Of a frame by somebody whom nobody knows yet."""
NONCE_BYTES = 32
TLS_RECORD = b"\x16\x03"
"""How a TLS handshake begins [RFC 8446, 5.1]: as a length it is beyond `MAX_BYTES`."""

MessageT = TypeVar("MessageT", bound=msgspec.Struct)


class HandshakeError(ConnectionError):
    """The other side is not who it should be, or no side of ours at all."""


class DepartedError(HandshakeError):
    """Somebody connected and left without a word, as health checks do."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The engine speaks first."""

    protocol: str
    nonce: bytes


class Claim(msgspec.Struct, frozen=True, tag="claim"):
    """The front shows that it has the secret."""

    nonce: bytes
    mac: bytes


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """So does the engine."""

    mac: bytes


async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: str | None) -> None:
    """The engine's side. Raises `HandshakeError` for whoever does not have the secret, after a few seconds at most."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            writer.write(encode_frame(Hello(PROTOCOL, nonce)))
            claim = await _read(reader, Claim)
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            raise DepartedError("it left without a word") from error
        raise HandshakeError(f"no front: it said {len(error.partial)} bytes and left") from error
    except (TimeoutError, OSError) as error:
        raise HandshakeError(f"no front: {str(error) or 'it said nothing'}") from error
    if len(claim.nonce) != NONCE_BYTES or not hmac.compare_digest(
        claim.mac, _mac(secret, b"front", nonce, claim.nonce)
    ):
        raise HandshakeError("a front with another secret")
    writer.write(encode_frame(Welcome(_mac(secret, b"engine", nonce, claim.nonce))))


async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: str | None) -> None:
    """The front's side. Raises `HandshakeError` for an engine that does not have the secret, or refuses ours."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            try:
                hello = await _read(reader, Hello)
            except EOFError as error:  # the secret is not told before
                raise HandshakeError("it closed the connection before it said anything; its log says why") from error
            if hello.protocol != PROTOCOL:
                raise HandshakeError(f"it speaks {hello.protocol[:32]!r}, this front {PROTOCOL!r}")
            writer.write(encode_frame(Claim(nonce, _mac(secret, b"front", hello.nonce, nonce))))
            welcome = await _read(reader, Welcome)
    except EOFError as error:
        raise HandshakeError("it refused this front: the secrets differ") from error
    except TimeoutError as error:
        raise HandshakeError(f"it said nothing within {HANDSHAKE_SECONDS:g} s") from error
    except HandshakeError:
        raise
    except OSError as error:
        raise HandshakeError(f"the connection broke: {error}") from error
    if not hmac.compare_digest(welcome.mac, _mac(secret, b"engine", hello.nonce, nonce)):
        raise HandshakeError("an engine with another secret")


async def _read(reader: asyncio.StreamReader, kind: type[MessageT]) -> MessageT:
    """One message, and no byte behind it."""
    header = await reader.readexactly(4)
    if header.startswith(TLS_RECORD):
        raise HandshakeError("it speaks TLS, and this side has no certificates: set tls_cert, tls_key and tls_ca")
    (length,) = struct.unpack("<I", header)
    if length > MAX_BYTES:
        raise HandshakeError(f"a frame announces {length} bytes; the limit is {MAX_BYTES}")
    try:
        return msgspec.msgpack.decode(await reader.readexactly(length), type=kind)
    except (ValueError, RecursionError) as error:
        raise HandshakeError(f"no {kind.__name__}: {error}") from error


def _mac(secret: str | None, role: bytes, engine_nonce: bytes, front_nonce: bytes) -> bytes:
    key = (secret or "").encode()
    return hmac.digest(key, PROTOCOL.encode() + b"\0" + role + b"\0" + engine_nonce + front_nonce, hashlib.sha256)
