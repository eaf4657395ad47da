"""What happens to a row outside the matrix products: norms, encoding for a product, rotation, activation, embedding."""

from __future__ import annotations

import numpy as np

from target.native.compiling import native
from target.native.tiles import FLOAT, GROUP, PANEL_BYTES, Q4, Q8, ROW_BYTES
from target.native.vectors import (
    broadcast,
    exponential,
    larger,
    load,
    load_float,
    load_half,
    load_integer,
    magnitude,
    max_lanes,
    multiply_add,
    store,
    store_float,
    store_rounded,
    sum_lanes,
)

# Numba does not look into a dictionary.
_PANEL_BYTES_Q4, _PANEL_BYTES_Q8, _PANEL_BYTES_FLOAT = (PANEL_BYTES[kind] for kind in (Q4, Q8, FLOAT))
_ROW_BYTES_Q4, _ROW_BYTES_Q8, _ROW_BYTES_FLOAT = (ROW_BYTES[kind] for kind in (Q4, Q8, FLOAT))


@native
def panel_bytes(kind: int) -> int:
    """Bytes of one group of a panel of weights."""
    return _PANEL_BYTES_Q4 if kind == Q4 else _PANEL_BYTES_Q8 if kind == Q8 else _PANEL_BYTES_FLOAT


@native
def row_bytes(kind: int) -> int:
    """Bytes of one group of a row that meets weights of this kind."""
    return _ROW_BYTES_Q4 if kind == Q4 else _ROW_BYTES_Q8 if kind == Q8 else _ROW_BYTES_FLOAT


@native
def normalise(x: int, weight: int, size: int, eps: float, out: int) -> None:
    """RMSNorm (Zhang and Sennrich, arXiv 1910.07467) of `size` floats at `x`; `out` may be `x`."""
    squares = broadcast(np.float32(0))
    for i in range(0, 4 * size, 64):
        v = load(x + i)
        squares = multiply_add(v, v, squares)
    mean = sum_lanes(squares) / np.float32(size)
    scale = broadcast(np.float32(1) / np.sqrt(np.float32(mean + eps)))
    for i in range(0, 4 * size, 64):
        store(out + i, load(x + i) * scale * load(weight + i))


@native
def encode(kind: int, x: int, num_groups: int, out: int) -> None:
    """Write the floats at `x` as activations for weights of `kind`; see `target.native.tiles` for the layouts."""
    if kind == Q4:
        for g in range(num_groups):
            _encode_bytes(x + 128 * g, out + _ROW_BYTES_Q4 * g)
    elif kind == Q8:
        for g in range(num_groups):
            _encode_words(x + 128 * g, out + _ROW_BYTES_Q8 * g)
    else:
        for i in range(0, 128 * num_groups, 64):
            store(out + i, load(x + i))


@native
def _peak(x: int) -> float:
    return max_lanes(larger(magnitude(load(x)), magnitude(load(x + 64))))


@native
def _encode_bytes(x: int, out: int) -> None:
    peak = _peak(x)
    inverse = broadcast(np.float32(127) / peak if peak > 0 else np.float32(0))
    total = store_rounded(8, out, load(x) * inverse) + store_rounded(8, out + 16, load(x + 64) * inverse)
    scale = peak / np.float32(127)
    store_float(out + 32, scale)
    store_float(out + 36, scale * np.float32(total))


@native
def _encode_words(x: int, out: int) -> None:
    peak = _peak(x)
    inverse = broadcast(np.float32(32767) / peak if peak > 0 else np.float32(0))
    store_rounded(16, out, load(x) * inverse)
    store_rounded(16, out + 32, load(x + 64) * inverse)
    store_float(out + 64, peak / np.float32(32767))


@native
def rotate(x: int, cos: int, sin: int, size: int, scale: float, out: int) -> None:
    """Rotary embedding of one head (halves, not neighbours, are pairs), times `scale`; `out` may be `x`."""
    factor = broadcast(scale)
    half = 2 * size
    for i in range(0, half, 64):
        a, b, c, s = load(x + i), load(x + half + i), load(cos + i), load(sin + i)
        store(out + i, (a * c - b * s) * factor)
        store(out + half + i, (b * c + a * s) * factor)


@native
def gate(gates: int, ups: int, size: int, out: int) -> None:
    """silu(gate) * up of `size` floats."""
    zero, one = broadcast(np.float32(0)), broadcast(np.float32(1))
    for i in range(0, 4 * size, 64):
        g = load(gates + i)
        store(out + i, g / (one + exponential(zero - g)) * load(ups + i))


@native
def add_to(x: int, y: int, size: int) -> None:
    """x += y, of `size` floats."""
    for i in range(0, 4 * size, 64):
        store(x + i, load(x + i) + load(y + i))


@native
def copy(x: int, size: int, out: int) -> None:
    """Copy `size` floats."""
    for i in range(0, 4 * size, 64):
        store(out + i, load(x + i))


@native
def decode_channel(kind: int, weights: int, num_groups: int, channel: int, out: int) -> None:
    """Write the weights of one output channel as floats: a row of an embedding that is stored as panels."""
    size = panel_bytes(kind)
    panel, lane = weights + channel // 16 * num_groups * size, channel % 16
    for g in range(num_groups):
        group = panel + g * size
        for k in range(GROUP):
            store_float(out + 128 * g + 4 * k, _weight(kind, group, lane, k))


@native
def _weight(kind: int, group: int, lane: int, k: int) -> float:
    if kind == FLOAT:
        return load_float(group + 64 * k + 4 * lane)
    scale = load_half(group + 2 * lane)
    if kind == Q8:
        return scale * np.float32(load_integer(8, group + 32 + 32 * (k // 2) + 2 * lane + k % 2))
    j = k % 16
    byte = load_integer(8, group + 64 + 64 * (j // 4) + 4 * lane + j % 4)
    nibble = (byte >> 4) & 15 if k >= 16 else byte & 15
    return scale * np.float32(nibble) + load_half(group + 32 + 2 * lane)
