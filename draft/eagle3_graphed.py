"""The EAGLE-3 head on a CUDA device: attention by Triton's kernels, its steps captured as CUDA graphs."""

from __future__ import annotations

import torch

from draft.eagle3_head import Eagle3Architecture, Eagle3Layer, Eagle3Weights, head_pool
from target.attention import HeadLayout
from target.batch import ForwardBatch
from target.cuda_graphs import MAX_GRAPH_ROWS, StepGraphs
from target.linear import TILE_ROWS, RowCounts
from target.triton.attention import TritonAttention
from target.triton.graphed_steps import GraphedSteps


class GraphedEagle3Head:
    """A `draft.eagle3_head.PairHead` whose forwards are padded to a few numbers of rows, which graphs are kept for."""

    def __init__(self, config: Eagle3Architecture, weights: Eagle3Weights, *, num_blocks: int, block_size: int) -> None:
        """`weights` as for `Eagle3Layer`, all on one device. Raises `ValueError` for a dtype without kernels."""
        layer = config.layer
        self.config = config
        self.target_ids = weights.target_ids
        self.kv_pool = head_pool(config, weights, num_blocks=num_blocks, block_size=block_size)
        heads = HeadLayout(layer.num_heads, layer.num_kv_heads, layer.head_size)
        attention = TritonAttention(self.kv_pool, heads, window=None)
        self._layer = Eagle3Layer(config, weights, attention)
        self.graphs = StepGraphs("steps of the EAGLE-3 head", enabled=weights.fc.device.type == "cuda")
        counts = RowCounts(TILE_ROWS)
        self._steps = GraphedSteps(attention, self.graphs, counts, counts)
        self._hidden = weights.fc.new_zeros(MAX_GRAPH_ROWS, layer.hidden_size)

    @torch.inference_mode()
    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """See `PairHead.fuse`."""
        return self._layer.fuse(states)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PairHead.forward`."""
        num_rows, num_wanted = self._steps.num_rows(batch), len(batch.logit_rows)
        fits = num_rows <= MAX_GRAPH_ROWS
        padded = self._hidden[:num_rows] if fits else hidden.new_zeros(num_rows, hidden.shape[1])
        padded[: len(hidden)] = hidden
        logits, outputs = self._steps.run(
            batch, None, lambda token_ids, positions, wanted: self._layer.pairs(token_ids, positions, padded, wanted)
        )
        assert outputs is not None
        # The next replay overwrites what this one returned, and outputs go on in place of features.
        return logits[:num_wanted].clone(), outputs[:num_wanted].clone()
