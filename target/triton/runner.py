"""A runner of Triton kernels, whose steps are CUDA graphs."""

from __future__ import annotations

import numpy as np
import torch

from target.attention import HeadLayout
from target.batch import ForwardBatch, ForwardOutput, IntArray
from target.config import ModelConfig
from target.cuda_graphs import Outputs, StepGraphs
from target.decoder import Decoder
from target.fp8 import fp8_library
from target.kv_pool import KVPool
from target.linear import TILE_ROWS, Products, choose_products
from target.rope import RotaryTable
from target.triton.attention import TritonAttention
from target.triton.operations import TritonOperations, quantise_rows
from target.weights import ModelWeights

MAX_GRAPH_ROWS = 256


class TritonRunner:
    """See `target.runner.Runner`. One copy brings a step's integers to the device; logits stay there.

    `max_model_len`: positions to serve, at most the model's. `quantization`: of the layers' matrices, "none" or "fp8".
    `use_graphs`: on CUDA; elsewhere there are none.
    Raises `ValueError` for a precision without kernels.
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
        use_graphs: bool = True,
    ) -> None:
        dtype = weights.embed.dtype
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
        heads = HeadLayout(config.num_heads, config.num_kv_heads, config.head_size)
        self._attention = TritonAttention(self.kv_pool, heads, window=config.sliding_window)
        with torch.inference_mode():
            body = _layer_products(weights, device, quantization)
            head = choose_products([(weights.lm_head, None)], device, 64, TILE_ROWS)
            rotary = RotaryTable(config, max_model_len, dtype, device)
            self._decoder = Decoder(config, weights, rotary, body.make, TritonOperations(), device)
            self._head = head.make(weights.lm_head.to(device), None)
        self._row_counts, self._head_counts = body.row_counts, head.row_counts
        self.graphs = StepGraphs(enabled=use_graphs and device.type == "cuda")
        self._work = self._attention.work
        counts = ", ".join(map(str, body.row_counts.counts))
        self.description = (
            f"triton on {device}, {str(dtype).removeprefix('torch.')}, products by {body.library} for {counts} rows, "
            f"{'CUDA graphs' if self.graphs.enabled else 'no graphs'}; "
            f"products' rows were {'found' if body.stable and head.stable else 'NOT FOUND'} to be independent"
        )

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """See `target.runner.Runner.forward`."""
        num_new, num_wanted = len(batch.token_ids), len(batch.logit_rows)
        num_rows, num_logits = self._row_counts.padded(num_new), self._head_counts.padded(num_wanted)
        ids: IntArray = np.zeros(2 * num_rows + num_logits, np.int64)
        ids[:num_new] = batch.token_ids
        ids[num_rows : num_rows + num_new] = batch.positions
        ids[2 * num_rows : 2 * num_rows + num_wanted] = batch.logit_rows
        staged = self._attention.stage(batch, num_rows, ids)
        if self._attention.work is not self._work:
            self._work = self._attention.work
            self.graphs.clear()

        def compute() -> Outputs:
            token_ids, positions, wanted = staged.split([num_rows, num_rows, num_logits])
            hidden, features = self._decoder.forward(token_ids, positions, self._attention, batch.feature_layers)
            return self._head(hidden.index_select(0, wanted)), features

        if num_rows <= MAX_GRAPH_ROWS:
            logits, features = self.graphs.run((num_rows, num_logits, batch.feature_layers), compute)
        else:
            logits, features = compute()
        # The next replay overwrites what this one returned, and a caller may keep it.
        return ForwardOutput(
            logits[:num_wanted].to(torch.float32, copy=True),
            None if features is None else features[:num_new].to(torch.float32, copy=True),
        )


def _layer_products(weights: ModelWeights, device: torch.device, quantization: str) -> Products:
    """Tried on the first layer, which is let go of again."""
    libraries = [fp8_library(quantise_rows)] if quantization == "fp8" else ()
    return choose_products(next(iter(weights.layers)).linears, device, 256, TILE_ROWS, libraries)
