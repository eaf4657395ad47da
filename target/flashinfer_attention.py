"""Attention by FlashInfer's kernels, which the extra `flashinfer` installs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from target.attention import HeadLayout
from target.attention_plan import RowSpans
from target.batch import ForwardBatch
from target.kv_pool import KVPool
from target.rope import Rotation

WORKSPACE_BYTES = 128 << 20


class FlashInferAttention:
    """See `target.attention.AttentionBackend`.

    Its sums follow the block table and the shape of the batch, so that a row's last bits depend on its neighbours.
    Raises `ValueError` where FlashInfer is not installed.
    """

    def __init__(self, pool: KVPool, heads: HeadLayout, window: int | None) -> None:
        try:
            import flashinfer
        except ImportError as error:
            raise ValueError(
                "backend is 'flashinfer', which is not installed; pip install 'forerun[flashinfer]' or take 'triton'"
            ) from error
        self._pool, self._heads, self._window = pool, heads, window
        device = pool.entries.device
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrapper: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        self._slots = torch.empty(0, dtype=torch.int64, device=device)

    def begin(self, batch: ForwardBatch, num_rows: int) -> None:
        """See `AttentionBackend.begin`."""
        device, size = self._pool.entries.device, self._pool.block_size
        totals = batch.num_computed + np.diff(batch.row_starts)
        num_blocks = -(-totals // size)
        taken = np.arange(batch.block_tables.shape[1]) < num_blocks[:, None]
        has_branches = not RowSpans(batch, size, None).in_slot_order.all()
        self._wrapper.plan(
            *(
                torch.from_numpy(numbers.astype(np.int32)).to(device)
                for numbers in (
                    batch.row_starts,
                    np.concatenate(([0], np.cumsum(num_blocks))),
                    batch.block_tables[taken],
                    (totals - 1) % size + 1,
                )
            ),
            self._heads.num_heads,
            self._heads.num_kv_heads,
            self._heads.head_size,
            size,
            custom_mask=torch.from_numpy(seen_keys(batch, self._window)).to(device) if has_branches else None,
            causal=not has_branches,
            sm_scale=self._heads.head_size**-0.5,
            window_left=-1 if self._window is None or has_branches else self._window - 1,
            q_data_type=self._pool.entries.dtype,
            kv_data_type=self._pool.entries.dtype,
        )
        self._slots = torch.from_numpy(batch.slot_mapping).to(device)

    def attend(self, layer: int, qkv: torch.Tensor, rotation: Rotation | None = None) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        heads, num_new = self._heads, len(self._slots)
        if rotation is not None:
            rotation.apply(qkv, heads.num_heads, heads.num_kv_heads)
        entries = self._pool.entries[layer]
        entries.index_copy_(1, self._slots, qkv[:num_new, heads.num_heads :].transpose(0, 1).contiguous())
        keys, values = (
            part[:, : self._pool.zero_slot].unflatten(1, (-1, self._pool.block_size)).permute(1, 2, 0, 3)
            for part in entries.split(heads.num_kv_heads)
        )
        out = qkv.new_zeros(len(qkv), heads.num_heads * heads.head_size)
        queries = qkv[:num_new, : heads.num_heads].contiguous()
        out[:num_new] = self._wrapper.run(queries, (keys, values)).flatten(1)
        return out


def seen_keys(batch: ForwardBatch, window: int | None) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """For each sequence [rows, keys in the order of the block table], flattened: whether the row sees the key."""
    spans = RowSpans(batch, 1, window)
    parts = []
    for s, (start, end) in enumerate(zip(batch.row_starts[:-1], batch.row_starts[1:], strict=True)):
        base = int(batch.num_computed[s] + batch.chain_lens[s])
        key = np.arange(batch.num_computed[s] + end - start)
        masks = batch.tree_masks[start:end, None]
        on_path = (masks >> np.clip(key - base, 0, 63) & 1).astype(np.bool_)
        # A key in the tree has the logical index that its depth among the row's ancestors gives it.
        logical = np.where(key < base, key, base - 1 + np.cumsum(on_path & (key >= base), axis=1))
        inside = (logical >= spans.first_key[start:end, None]) & (logical < spans.visible[start:end, None])
        parts.append((inside & ((key < base) | on_path)).ravel())
    return np.concatenate(parts)
