"""Medusa heads as a differentiable module, begun at the best linear guess of each position (arXiv 2401.10774)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import torch
from torch import nn
from torch.nn import functional

from draft.training.initialise import RIDGE
from draft.training.samples import Batch


class MedusaModule(nn.Module):
    """Head d: one residual block over the target's last hidden state, then a map of hidden states, [E, E].

    The map stands before the target's output rows, so that few weights are trained; `checkpoint` multiplies both.
    """

    def __init__(self, num_heads: int, lm_head: torch.Tensor) -> None:
        """`lm_head` [V, E] are the target's output rows."""
        super().__init__()
        self._lm_head = lm_head
        size = lm_head.shape[1]
        # Blocks of zeros add nothing: training begins at the maps alone.
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(size, size)) for _ in range(num_heads))
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(size)) for _ in range(num_heads))
        self.maps = nn.ParameterList(nn.Parameter(torch.eye(size)) for _ in range(num_heads))

    def output_rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `lesson.HeadModule`."""
        return self._lm_head[token_ids]

    def forward(
        self, features: torch.Tensor, token_ids: torch.Tensor, is_pair: torch.Tensor, num_steps: int
    ) -> Iterator[torch.Tensor]:
        """See `lesson.HeadModule.forward`; `features` [B, P, E] are the target's last hidden states."""
        for weight, bias, linear_map in islice(zip(self.weights, self.biases, self.maps, strict=True), num_steps):
            yield functional.linear(features + functional.silu(functional.linear(features, weight, bias)), linear_map)

    def checkpoint(self) -> dict[str, torch.Tensor]:
        """Tensors in the authors' layout."""
        tensors: dict[str, torch.Tensor] = {}
        for i, (weight, bias, linear_map) in enumerate(zip(self.weights, self.biases, self.maps, strict=True)):
            tensors[f"{i}.0.linear.weight"] = weight.detach()
            tensors[f"{i}.0.linear.bias"] = bias.detach()
            tensors[f"{i}.1.weight"] = self._lm_head @ linear_map.detach()
        return tensors


@torch.no_grad()
def initialise_medusa(module: MedusaModule, batches: Iterable[Batch]) -> None:
    """Set each head's map to the ridge regression of the hidden state that far ahead on the present one."""
    size = module.maps[0].shape[0]
    inputs = torch.zeros(len(module.maps), size, size, dtype=torch.float64)
    products = torch.zeros_like(inputs)
    for batch in batches:
        for d in range(len(module.maps)):
            kept = batch.is_pair[:, d:]
            now, then = batch.features[:, : kept.shape[1]][kept], batch.states[:, d:][kept]
            inputs[d] += now.T @ now
            products[d] += now.T @ then
    for d, linear_map in enumerate(module.maps):
        added = RIDGE * inputs[d].diagonal().mean() * torch.eye(size)
        linear_map.copy_(torch.linalg.solve(inputs[d] + added, products[d]).T)
