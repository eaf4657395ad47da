"""The paged cache of keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from target.transfers import to_device


class KVPool:
    """Keys and values of `num_blocks` blocks of `block_size` tokens for every layer.

    `entries` has shape [num_layers, 2 * num_kv_heads, num_slots + 1, head_size]: the key heads, then the value heads.
    Slot = block id * block_size + offset. Block 0 is the null block: padding is written there and nothing reads it.
    The one slot behind the last block is `zero_slot`: never written, and read wherever a gather has nothing to read,
    so that what lies in blocks a sequence does not own cannot reach it, not even as NaN * 0.
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
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.zero_slot = num_blocks * block_size
        shape = (num_layers, 2 * num_kv_heads, self.zero_slot + 1, head_size)
        # Nothing reads what was not written, so only the zero slot needs a value, and memory is taken as it is used.
        self.entries = torch.empty(shape, dtype=dtype, device=device)
        self.entries[:, :, self.zero_slot] = 0

    @torch.inference_mode()
    def move(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy the entries at slots `sources` to slots `destinations`, in every layer, as if all at once.

        Sources and destinations may overlap: the accepted path of a draft tree moves down to stand side by side.
        """
        if not sources:
            return
        device = self.entries.device
        source = to_device(sources, device)
        destination = to_device(destinations, device)
        self.entries[:, :, destination] = self.entries[:, :, source]
