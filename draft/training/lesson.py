"""What heads learn: the target's next-token distribution, one position ahead and several."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from draft.training.samples import Batch


class HeadModule(Protocol):
    """A head in training: says hidden states, and has output rows that turn them into logits."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """What is trained."""

    def output_rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[K, E'] the rows of tokens [K]: the target's, where a head shares them."""

    def forward(
        self, features: torch.Tensor, token_ids: torch.Tensor, is_pair: torch.Tensor, num_steps: int
    ) -> Iterator[torch.Tensor]:
        """[B, P, E'] for each of `num_steps` positions: output p of step s is of the token s + 1 behind pair p's."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The target's output rows, and which tokens matter."""

    lm_head: torch.Tensor
    """[V, E] all of them, float32"""
    target_ids: torch.Tensor
    """[C] ascending ids of the draft vocabulary: what may be guessed"""
    common_ids: torch.Tensor
    """[K] the most frequent of them, which every loss looks at"""


class HeadLesson:
    """Cross-entropy against the target's own distribution at every position, over `num_steps` unrolled steps.

    The softmax of a loss runs over the common tokens, those of the batch, and a random sample of the rest: the output
    rows stay as they are, so what is learned about hidden states holds for all.
    """

    def __init__(
        self,
        module: HeadModule,
        rows: Rows,
        *,
        num_steps: int = 3,
        decay: float = 0.6,
        sharpness: float = 1.0,
        seed: int = 0,
    ) -> None:
        """Later steps count `decay` times the one before. The target's logits are multiplied by `sharpness`."""
        self._module = module
        self._rows = rows
        self._num_steps = num_steps
        self._decay = decay
        self._sharpness = sharpness
        self._seed = seed

    @property
    def module(self) -> HeadModule:
        return self._module

    def loss(self, batch: Batch) -> torch.Tensor:
        """See `trainer.Lesson.loss`."""
        looked_at = self._looked_at(batch)
        rows = self._rows.lm_head[looked_at]
        with torch.no_grad():
            wanted = torch.zeros(*batch.is_pair.shape, len(rows))
            target_logits = (batch.states[batch.is_pair] @ rows.T).float()
            wanted[batch.is_pair] = (target_logits * self._sharpness).softmax(-1)
        total, weights = torch.zeros(()), 0.0
        draft_rows = self._module.output_rows(looked_at)
        outputs = self._module.forward(batch.features, batch.token_ids, batch.is_pair, self._num_steps)
        for step, hidden in enumerate(outputs):
            kept = batch.is_pair[:, step:]
            logprobs = (hidden[:, : kept.shape[1]][kept] @ draft_rows.T).float().log_softmax(-1)
            weight = self._decay**step
            total = total - weight * (wanted[:, step:][kept] * logprobs).sum(-1).mean()
            weights += weight
        return total / weights

    @torch.no_grad()
    def accuracies(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """See `trainer.Lesson.accuracies`: of the answers' tokens, those that the target's largest logit names."""
        right, count = torch.zeros(self._num_steps), torch.zeros(self._num_steps)
        said = torch.full(batch.is_pair.shape, -1)
        said[batch.is_answer] = (batch.states[batch.is_answer] @ self._rows.lm_head.T).argmax(-1)
        draft_rows = self._module.output_rows(self._rows.target_ids)
        outputs = self._module.forward(batch.features, batch.token_ids, batch.is_pair, self._num_steps)
        for step, hidden in enumerate(outputs):
            kept = batch.is_answer[:, step:]
            columns = (hidden[:, : kept.shape[1]][kept] @ draft_rows.T).argmax(-1)
            right[step] = (self._rows.target_ids[columns] == said[:, step:][kept]).sum()
            count[step] = kept.sum()
        return right, count

    def _looked_at(self, batch: Batch) -> torch.Tensor:
        """[K'] ascending ids of the tokens whose rows a loss compares."""
        num_sampled = min(len(self._rows.common_ids) // 4, len(self._rows.target_ids))
        # Drawn anew for every batch, and the same again for the same batch, so that a resumed training repeats itself.
        generator = torch.Generator().manual_seed(self._seed + int(batch.token_ids.sum()))
        drawn = torch.randint(len(self._rows.target_ids), (num_sampled,), generator=generator)
        ids = torch.cat((self._rows.common_ids, batch.token_ids[batch.is_pair], self._rows.target_ids[drawn]))
        looked_at: torch.Tensor = torch.unique(ids)
        return looked_at
