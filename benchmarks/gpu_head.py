"""A drafting head of random weights beside a model: what a level of its drafts takes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import msgspec
import torch

from benchmarks.gpu_timing import Measurement, timed
from draft.eagle3_graphed import GraphedEagle3Head
from draft.eagle3_head import Eagle3Architecture, Eagle3Weights
from target.config import ModelConfig
from target.layout import BatchEntry, lay_out

DRAFT_VOCAB = 32000
BLOCK_SIZE = 16
CONTEXT = 512
BUSHY = (-1, 0, 0, 1, -1, 4, 3, 2)


class HeadBench:
    """An EAGLE-3 head for a model of this shape."""

    def __init__(self, name: str, config: ModelConfig, dtype: torch.dtype, device: torch.device, repeats: int) -> None:
        self._name, self._device, self._dtype, self._repeats = name, device, dtype, repeats
        self._context = min(CONTEXT, config.max_model_len - 2 * BLOCK_SIZE)
        layer = msgspec.structs.replace(config, num_layers=1)
        architecture = Eagle3Architecture(layer, (1, 2, 3), min(DRAFT_VOCAB, config.vocab_size))
        num_blocks = 2 + (self._context + len(BUSHY)) // BLOCK_SIZE
        weights = random_head(architecture, dtype, device)
        self.head = GraphedEagle3Head(architecture, weights, num_blocks=1 + num_blocks, block_size=BLOCK_SIZE)
        self.head.kv_pool.entries.zero_()  # what was in memory before may be slow to compute with
        self._hidden = torch.randn(1 + len(BUSHY), layer.hidden_size, device=device).to(dtype)
        self._blocks = range(1, 1 + num_blocks)

    def steps(self) -> Iterator[Measurement]:
        """One guess behind a context, and a tree's level, with graphs and without."""
        single = BatchEntry(self._context, [1], self._blocks, logits_from=0)
        level = BatchEntry(self._context, [1], self._blocks, [2] * len(BUSHY), BUSHY, logits_from=1)
        enabled = self.head.graphs.enabled
        for graphs in (enabled, False) if enabled else (False,):
            self.head.graphs.enabled = graphs
            for what, entry in (("one guess", single), ("a level of 8", level)):
                value = round(1e3 * timed(partial(self._step, entry), self._repeats, self._device), 4)
                suffix = "" if graphs else " without graphs"
                yield Measurement(model=self._name, what=f"EAGLE-3 head, {what}{suffix}", value=value, unit="ms")

    def _step(self, entry: BatchEntry) -> None:
        num_rows = len(entry.chain) + len(entry.tree)
        logits, _ = self.head.forward(lay_out([entry], BLOCK_SIZE), self._hidden[:num_rows])
        logits.argmax(dim=-1).tolist()


def random_head(architecture: Eagle3Architecture, dtype: torch.dtype, device: torch.device) -> Eagle3Weights:
    """Weights on the device, of a size that keeps activations near one."""
    layer = architecture.layer
    size, width, heads = layer.hidden_size, layer.intermediate_size, layer.num_heads * layer.head_size
    generator = torch.Generator(device).manual_seed(0)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(std=shape[-1] ** -0.5, generator=generator)

    def ones() -> torch.Tensor:
        return torch.ones(size, dtype=dtype, device=device)

    return Eagle3Weights(
        fc=matrix(size, len(architecture.feature_layers) * size),
        feature_norm=None,
        input_norm=ones(),
        hidden_norm=ones(),
        qkv=matrix(heads + 2 * layer.num_kv_heads * layer.head_size, 2 * size),
        q_norm=None,
        k_norm=None,
        output=matrix(size, heads),
        post_norm=ones(),
        gate_up=matrix(2 * width, size),
        down=matrix(size, width),
        norm=ones(),
        lm_head=matrix(architecture.draft_vocab_size, size),
        target_ids=torch.arange(architecture.draft_vocab_size, device=device),
        embed=matrix(layer.vocab_size, size),
    )
