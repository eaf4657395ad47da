"""The paged cache of keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class KVPool:
    """Keys and values of `num_blocks` blocks of `block_size` tokens for every layer.

    `keys` and `values` have shape [num_layers, num_blocks * block_size, num_kv_heads, head_size]. Block 0 is the null
    block: padding rows are written there and nothing reads it.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, num_blocks * block_size, num_kv_heads, head_size)
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def move(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy the entries at slots `sources` to slots `destinations`, in every layer, as if all at once.

        Sources and destinations may overlap: the accepted path of a draft tree moves down to stand side by side.
        """
        if not sources:
            return
        device = self.keys.device
        source = torch.tensor(sources, device=device)
        destination = torch.tensor(destinations, device=device)
        for pool in (self.keys, self.values):
            pool[:, destination] = pool[:, source]
