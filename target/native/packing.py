"""Laying weights out as panels of 16 output channels, in the layouts of `target.native.tiles`.

Quantised weights pass through GGUF's own blocks of 32 inputs: Q4_1 (scale f16, minimum f16, 16 bytes of nibbles) and
Q8_0 (scale f16, 32 int8).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from target.native.tiles import GROUP, Q4, Q8

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

Q4_BLOCK, Q8_BLOCK = 20, 34
"""Bytes of one Q4_1 and one Q8_0 block."""
_PANEL = 16


def pack(weight: Floats, kind: int) -> Bytes:
    """Panels [ceil(N / 16), K / 32, bytes] of a weight [N, K], quantised where `kind` asks for it."""
    if kind == Q4:
        return pack_q4_blocks(quantise_q4(weight))
    if kind == Q8:
        return pack_q8_blocks(quantise_q8(weight))
    outputs, inputs = weight.shape
    panels = _in_panels(weight.reshape(outputs, inputs // GROUP, GROUP))
    return np.ascontiguousarray(panels.transpose(0, 2, 3, 1)).view(np.uint8).reshape(len(panels), inputs // GROUP, -1)


def pack_q4_blocks(blocks: Bytes) -> Bytes:
    """Panels [ceil(N / 16), G, 320] of Q4_1 blocks [N, G, 20]."""
    panels = _in_panels(blocks)
    count, _, groups, _ = panels.shape
    packed = np.empty((count, groups, 320), np.uint8)
    for part in range(2):
        packed[..., 32 * part : 32 * part + 32] = _halves(panels, 2 * part)
    nibbles = panels[..., 4:].reshape(count, _PANEL, groups, 4, 4)
    packed[..., 64:] = nibbles.transpose(0, 2, 3, 1, 4).reshape(count, groups, 256)
    return packed


def pack_q8_blocks(blocks: Bytes) -> Bytes:
    """Panels [ceil(N / 16), G, 544] of Q8_0 blocks [N, G, 34]."""
    panels = _in_panels(blocks)
    count, _, groups, _ = panels.shape
    packed = np.empty((count, groups, 544), np.uint8)
    packed[..., :32] = _halves(panels, 0)
    integers = panels[..., 2:].reshape(count, _PANEL, groups, 16, 2)
    packed[..., 32:] = integers.transpose(0, 2, 3, 1, 4).reshape(count, groups, 512)
    return packed


def quantise_q4(weight: Floats) -> Bytes:
    """Q4_1 blocks [N, K / 32, 20] of a weight [N, K]: each group's smallest and largest weight are kept."""
    groups = weight.reshape(weight.shape[0], -1, GROUP)
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    scale, minimum = ((high - low) / 15).astype(np.float16), low.astype(np.float16)
    steps = _divided(groups - minimum.astype(np.float32), scale.astype(np.float32))
    nibbles = np.clip(np.rint(steps), 0, 15).astype(np.uint8)
    return np.concatenate(
        [scale.view(np.uint8), minimum.view(np.uint8), nibbles[..., :16] | nibbles[..., 16:] << 4], -1
    )


def quantise_q8(weight: Floats) -> Bytes:
    """Q8_0 blocks [N, K / 32, 34] of a weight [N, K]."""
    groups = weight.reshape(weight.shape[0], -1, GROUP)
    scale = (np.abs(groups).max(-1, keepdims=True) / 127).astype(np.float16)
    integers = np.clip(np.rint(_divided(groups, scale.astype(np.float32))), -127, 127).astype(np.int8)
    return np.concatenate([scale.view(np.uint8), integers.view(np.uint8)], -1)


def _divided(values: Floats, scale: Floats) -> Floats:
    """values / scale, 0 where the scale is 0."""
    return np.divide(values, scale, out=np.zeros_like(values), where=scale != 0)


def dequantise(blocks: Bytes) -> Floats:
    """The weight [N, K] that Q4_1 or Q8_0 blocks stand for."""
    scale = blocks[..., :2].copy().view(np.float16).astype(np.float32)
    if blocks.shape[-1] == Q8_BLOCK:
        return (scale * blocks[..., 2:].view(np.int8)).reshape(len(blocks), -1)
    minimum = blocks[..., 2:4].copy().view(np.float16).astype(np.float32)
    nibbles = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], -1)
    return (scale * nibbles + minimum).reshape(len(blocks), -1)


def interleave_gate_up(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[2F, …] the gate's rows, then the up projection's, reordered to 32 of one, 32 of the other, and so on."""
    halves = rows.reshape(2, -1, GROUP, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(0, 1)).reshape(rows.shape)


def _in_panels(rows: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """[N, …] as [panels, 16, …], filled up with zeros."""
    missing = -len(rows) % _PANEL
    if missing:
        rows = np.concatenate([rows, np.zeros((missing, *rows.shape[1:]), rows.dtype)])
    return rows.reshape(-1, _PANEL, *rows.shape[1:])


def _halves(panels: npt.NDArray[np.generic], first: int) -> npt.NDArray[np.generic]:
    """[panels, G, 32] the float16 at byte `first` of each block, of the 16 channels of each panel."""
    halves = panels[..., first : first + 2].transpose(0, 2, 1, 3)
    return np.ascontiguousarray(halves).reshape(*halves.shape[:2], 2 * _PANEL)
