"""Forwards over one attention, padded to few numbers of rows and captured as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import numpy as np
import torch

from target.batch import ForwardBatch, IntArray
from target.cuda_graphs import MAX_GRAPH_ROWS, Outputs, StepGraphs
from target.linear import RowCounts
from target.triton.attention import TritonAttention

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Outputs]
"""From token ids and positions of the padded rows, and the rows whose logits are wanted, padded too."""


class GraphedSteps:
    """One copy brings a forward's integers to where its graph reads them.

    Whatever else a computation reads must keep its address as well.
    """

    def __init__(
        self, attention: TritonAttention, graphs: StepGraphs, row_counts: RowCounts, logit_counts: RowCounts
    ) -> None:
        self.graphs = graphs
        self._attention = attention
        self._row_counts, self._logit_counts = row_counts, logit_counts
        self._work = attention.work

    def num_rows(self, batch: ForwardBatch) -> int:
        """The batch's rows, padding included."""
        return self._row_counts.padded(len(batch.token_ids))

    def run(self, batch: ForwardBatch, kind: Hashable, compute: Compute) -> Outputs:
        """What `compute` makes of the batch. It is overwritten by the next forward of as many rows and this `kind`."""
        num_new, num_wanted = len(batch.token_ids), len(batch.logit_rows)
        num_rows, num_logits = self.num_rows(batch), self._logit_counts.padded(num_wanted)
        ids: IntArray = np.zeros(2 * num_rows + num_logits, np.int64)
        ids[:num_new] = batch.token_ids
        ids[num_rows : num_rows + num_new] = batch.positions
        ids[2 * num_rows : 2 * num_rows + num_wanted] = batch.logit_rows
        staged = self._attention.stage(batch, num_rows, ids)
        if self._attention.work is not self._work:
            self._work = self._attention.work
            self.graphs.clear()
        parts = staged.split([num_rows, num_rows, num_logits])
        if num_rows > MAX_GRAPH_ROWS:
            return compute(*parts)
        return self.graphs.run((num_rows, num_logits, kind), lambda: compute(*parts))
