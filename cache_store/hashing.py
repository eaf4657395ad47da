"""The identity of a KV block: a chained hash over everything its keys and values depend on.

    root      = H("root", fingerprint, salt)           the model's weights, dtype, quantisation, tokenizer; the tenant
    block 0   = H("block", root, its token ids)
    block i   = H("block", block i-1, its token ids)   so equal hashes mean equal tokens from position 0 on

H is BLAKE2b (RFC 7693) with a 16-byte digest; its personalisation parameter tells the two domains apart. A field has a
fixed width or is preceded by its length, little-endian, so no two inputs encode alike, and the same input gives
the same hash in every process, on every machine and in every version of Python.

Why 16 bytes: hashes are stored and sent by the hundred thousand, and 128 bits leave an accidental collision among 2^40
blocks a chance of 2^-49. Finding one on purpose takes 2^64 hashes and gains nothing: the block pool compares a hit with
the stored token ids, what the metadata store says only steers routing, and the hashes of another tenant are out of
reach because the salt is part of the root.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

HASH_SIZE = 16
"""Bytes of every hash here."""

_ROOT = hashlib.blake2b(digest_size=HASH_SIZE, person=b"forerun root 1")
_BLOCK = hashlib.blake2b(digest_size=HASH_SIZE, person=b"forerun block 1")


def root_hash(model_fingerprint: str, cache_salt: str) -> bytes:
    """The parent of every first block of one model and one salt. Any two strings are welcome, the empty one too."""
    state = _ROOT.copy()
    for text in (model_fingerprint, cache_salt):
        # A salt comes from a client, and JSON can carry half of a surrogate pair.
        field = text.encode("utf-8", "surrogatepass")
        state.update(struct.pack("<Q", len(field)) + field)
    return state.digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of the block that holds `token_ids` behind `parent`.

    Raises ValueError if `parent` is no hash, or an id does not fit in 32 unsigned bits.
    """
    return block_hashes(parent, token_ids, len(token_ids))[0] if len(token_ids) else _hash_block(parent, b"")


def block_hashes(root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """The hashes of the full blocks of `token_ids` behind `root`, in order; tokens that fill no block are left out.

    `root` may be any block's hash, to go on behind it. Raises ValueError as `block_hash` does.
    """
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}, must be at least 1")
    num_tokens = len(token_ids) // block_size * block_size
    packed = _pack(token_ids[:num_tokens])
    hashes = []
    parent = root
    for start in range(0, len(packed), 4 * block_size):
        parent = _hash_block(parent, packed[start : start + 4 * block_size])
        hashes.append(parent)
    return hashes


def _hash_block(parent: bytes, packed: bytes) -> bytes:
    if len(parent) != HASH_SIZE:
        raise ValueError(f"parent is {len(parent)} bytes long, must be a hash of {HASH_SIZE} bytes")
    # Both fields have a known length: the parent's is fixed, and the ids run to the end of the message, whose length
    # BLAKE2b itself hashes.
    state = _BLOCK.copy()
    state.update(parent + packed)
    return state.digest()


def _pack(token_ids: Sequence[int]) -> bytes:
    try:
        return struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error as error:
        raise ValueError(f"token_ids must be integers from 0 to {2**32 - 1}: {error}") from None
