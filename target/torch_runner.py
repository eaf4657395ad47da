"""A runner in plain torch, for any device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from target.attention import KEY_BLOCK, AttentionBackend, HeadLayout, TorchAttention, compute_dtype
from target.batch import ForwardBatch, ForwardOutput, IntArray
from target.config import ModelConfig
from target.decoder import Decoder
from target.fp8 import fp8_library
from target.kv_pool import KVPool
from target.linear import TILE_ROWS, Products, choose_products
from target.operations import TorchOperations
from target.rope import RotaryTable
from target.row_stability import stable_operations, stable_tiles
from target.weights import ModelWeights


class TorchRunner:
    """See `target.runner.Runner`. Every product runs for row counts that were found stable when it was made.

    `weights` are packed for this processor; the runner keeps no reference to them but the embedding.
    `max_model_len`: positions to serve, at most the model's. `quantization`: of the layers' matrices, "none" or "fp8".
    `make_attention`: another backend, of the pool, its heads and the window.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        device: torch.device,
        quantization: str = "none",
        make_attention: Callable[[KVPool, HeadLayout, int | None], AttentionBackend] | None = None,
    ) -> None:
        dtype = weights.embed.dtype
        heads = HeadLayout(config.num_heads, config.num_kv_heads, config.head_size)
        self.config = config
        self.device = device
        self.kv_pool = KVPool(
            num_layers=config.num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            dtype=dtype,
            device=device,
        )
        with torch.inference_mode():
            body = _layer_products(weights, device, quantization)
            head = choose_products([(weights.lm_head, None)], device, max_rows=32)
            tiles = stable_tiles(heads.queries_per_kv, heads.head_size, KEY_BLOCK, compute_dtype(dtype), device)
            self._decoder = Decoder(
                config,
                weights,
                RotaryTable(config, max_model_len, dtype, device),
                body.make,
                TorchOperations(),
                device,
            )
            self._head = head.make(weights.lm_head.to(device), None)
        self._row_counts, self._head_counts = body.row_counts, head.row_counts
        self._attention: AttentionBackend = (
            TorchAttention(self.kv_pool, heads, window=config.sliding_window, tiles=tiles)
            if make_attention is None
            else make_attention(self.kv_pool, heads, config.sliding_window)
        )
        stable = body.stable and head.stable and tiles.stable and stable_operations(config.hidden_size, dtype, device)
        self.description = (
            f"torch on {device}, {str(dtype).removeprefix('torch.')}, products by {body.library} for "
            f"{len(body.row_counts.counts)} row counts up to {body.row_counts.counts[-1]}; "
            f"rows were {'found' if stable else 'NOT FOUND'} to be independent"
        )

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """See `target.runner.Runner.forward`."""
        num_new = len(batch.token_ids)
        num_rows = self._row_counts.padded(num_new)
        self._attention.begin(batch, num_rows)
        token_ids = self._padded(batch.token_ids, num_rows)
        hidden, features = self._decoder.forward(
            token_ids, self._padded(batch.positions, num_rows), self._attention, batch.feature_layers
        )
        wanted = self._padded(batch.logit_rows, self._head_counts.padded(len(batch.logit_rows)))
        logits = self._head(hidden.index_select(0, wanted))
        return ForwardOutput(
            logits[: len(batch.logit_rows)].float(), None if features is None else features[:num_new].float()
        )

    def _padded(self, ids: IntArray, size: int) -> torch.Tensor:
        """`ids` on the device, filled up to `size` with 0."""
        padded = torch.zeros(size, dtype=torch.int64)
        padded[: len(ids)] = torch.from_numpy(ids)
        return padded.to(self.device, non_blocking=True)


def _layer_products(weights: ModelWeights, device: torch.device, quantization: str) -> Products:
    """Tried on the first layer, which is let go of again."""
    linears = next(iter(weights.layers)).linears
    if quantization == "fp8":
        return choose_products(linears, device, 256, TILE_ROWS, [fp8_library()])
    return choose_products(linears, device, max_rows=256)
