"""Medusa heads (Cai et al., arXiv 2401.10774): each guesses one position ahead from the target's last hidden state.

On disk (the authors' layout): tensors `{i}.{j}.linear.weight` and `.bias`, the residual blocks of head i, and
`{i}.{num_layers}.weight`, its output rows, which are the target's where they are left out; config.json has
`medusa_num_heads` and `medusa_num_layers`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch.nn import functional

from draft.config import MAX_SPECULATIVE_TOKENS
from draft.head_checkpoint import HeadTensors, TargetTables
from target.cuda_graphs import MAX_GRAPH_ROWS, StepGraphs
from target.errors import CheckpointError
from target.hf_config import read_json
from target.linear import TILE_ROWS, Linear, RowCounts, can_pack, packed_linear, plain_linear
from target.quantized_checkpoint import refuse_quantized

logger = logging.getLogger(__name__)

ROW_COUNTS = RowCounts(TILE_ROWS)
"""Numbers of sequences that graphs are kept for."""


@dataclass(frozen=True, slots=True)
class _Head:
    blocks: tuple[Linear, ...]
    """Each is added to its input through SiLU."""
    output: Linear


class MedusaHeads:
    """Heads over the target's last hidden state after its final norm. Head d says the token d + 2 places on."""

    def __init__(self, folder: Path, tables: TargetTables, dtype: torch.dtype, device: torch.device) -> None:
        """Raises `CheckpointError`, naming the field or tensor, for what is missing or does not fit the target."""
        path = folder / "config.json"
        fields = read_json(path)
        refuse_quantized(path, fields)
        num_heads, num_layers = fields.get("medusa_num_heads"), fields.get("medusa_num_layers", 1)
        if not isinstance(num_heads, int) or not 1 <= num_heads <= MAX_SPECULATIVE_TOKENS:
            raise CheckpointError(
                f"{path}: medusa_num_heads is {num_heads!r}; it must be 1 to {MAX_SPECULATIVE_TOKENS}"
            )
        if not isinstance(num_layers, int) or num_layers < 0:
            raise CheckpointError(f"{path}: medusa_num_layers is {num_layers!r}; it must be a whole number")
        for name in ("posterior_threshold", "posterior_alpha"):
            if name in fields:
                logger.warning("%s: %s belongs to typical acceptance, which changes answers; it is ignored", path, name)
        size, vocab_size = tables.config.hidden_size, tables.config.vocab_size
        tensors = HeadTensors(folder, prefixes=("model.", "medusa_head."))
        make = packed_linear if can_pack(dtype, device) else plain_linear

        def block(name: str) -> Linear:
            weight = tensors.take(f"{name}.linear.weight", (size, size)).to(device, dtype)
            return make(weight, tensors.take(f"{name}.linear.bias", (size,)).to(device, dtype))

        @cache
        def targets_rows() -> Linear:
            return make(tables.lm_head.to(device, dtype), None)

        def output(name: str) -> Linear:
            if name not in tensors:
                return targets_rows()
            return make(tensors.take(name, (vocab_size, size)).to(device, dtype), None)

        self._heads = [
            _Head(tuple(block(f"{i}.{j}") for j in range(num_layers)), output(f"{i}.{num_layers}.weight"))
            for i in range(num_heads)
        ]
        spare = tensors.ignore([f"{i}.*" for i in range(num_heads, MAX_SPECULATIVE_TOKENS)])
        if spare:
            logger.warning(
                "%s: medusa_num_heads is %d; %d tensors of further heads are not used", path, num_heads, spare
            )
        tensors.require_all_taken()
        self._dtype = dtype
        self.device = device
        self.target_ids = torch.arange(vocab_size, device=device)
        self.graphs = StepGraphs("steps of the Medusa heads", enabled=device.type == "cuda")
        self._states = torch.zeros(MAX_GRAPH_ROWS, size, dtype=dtype, device=device)
        """Where graphs read the hidden states."""

    def __len__(self) -> int:
        return len(self._heads)

    @torch.inference_mode()
    def forward(self, states: torch.Tensor, num_positions: int) -> torch.Tensor:
        """[n, num_positions, vocabulary] logits of the first heads behind hidden states [n, E]."""
        states = states.to(self.device, self._dtype)
        num_rows = ROW_COUNTS.padded(len(states))
        if not self.graphs.enabled or num_rows > MAX_GRAPH_ROWS:
            return self._compute(states, num_positions)
        self._states[: len(states)] = states
        padded = self._states[:num_rows]
        logits, _ = self.graphs.run((num_rows, num_positions), lambda: (self._compute(padded, num_positions), None))
        return logits[: len(states)].clone()  # the next replay overwrites what this one returned

    def _compute(self, states: torch.Tensor, num_positions: int) -> torch.Tensor:
        logits = []
        for head in self._heads[:num_positions]:
            x = states
            for linear in head.blocks:
                x = x + functional.silu(linear(x))
            logits.append(head.output(x))
        return torch.stack(logits, dim=1)
