"""The paged cache of keys and values as the native kernels read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from target.config import ModelConfig
from target.native.attention_tiles import TILE
from target.native.memory import Arena


class NativeKVPool:
    """Keys and values in float16, in tiles of 16 slots: slot s stands in tile s // 16, at place s % 16.

    `keys` [num_layers, tiles, num_kv_heads, head_size, 16]; `values` [num_layers, tiles, num_kv_heads, 16, head_size].
    """

    def __init__(self, config: ModelConfig, *, num_blocks: int, block_size: int) -> None:
        if block_size % TILE:
            raise ValueError(f"block_size is {block_size}; the native step needs a multiple of {TILE}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        tiles = num_blocks * block_size // TILE
        layers, heads, size = config.num_layers, config.num_kv_heads, config.head_size
        arena = Arena(2 * (2 * layers * tiles * heads * TILE * size + 64))
        self.keys = cast(npt.NDArray[np.float16], arena.empty((layers, tiles, heads, size, TILE), np.float16))
        self.values = cast(npt.NDArray[np.float16], arena.empty((layers, tiles, heads, TILE, size), np.float16))

    def move(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy the entries at slots `sources` to slots `destinations`, in every layer, as if all at once."""
        if not sources:
            return
        from_tile, from_place = np.divmod(np.asarray(sources), TILE)
        to_tile, to_place = np.divmod(np.asarray(destinations), TILE)
        self.keys[:, to_tile, :, :, to_place] = self.keys[:, from_tile, :, :, from_place]
        self.values[:, to_tile, :, to_place] = self.values[:, from_tile, :, from_place]
