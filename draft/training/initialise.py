"""Where training begins: the best linear guess, in closed form, written into the head's weights.

The target's next hidden state is regressed on the normalised features and the embedding (ridge regression). What the
features contribute is the fusing product; what the embedding contributes passes through attention: one query head of
each key head begins by looking at its own pair, and its values and outputs are the low-rank factors of the rest.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn import functional

from draft.training.eagle3_module import Eagle3Module
from draft.training.samples import Batch

RIDGE = 2e-3
"""Of the number of pairs: what is added to the diagonal of standardised features."""
SELF_SCORE = 16.0
"""Attention score of a pair with itself, where unrelated ones have about a quarter."""


class Regression:
    """Sums over batches, from which the best linear guess follows. Its inputs are scaled to a mean square of 1."""

    def __init__(self, num_features: int, hidden_size: int, eps: float) -> None:
        """Of `num_features` features of `hidden_size`, and an embedding."""
        self._num_features = num_features
        self._size = hidden_size
        self._eps = eps
        width = (num_features + 1) * hidden_size
        self._inputs = torch.zeros(width, width, dtype=torch.float64)
        self._products = torch.zeros(width, hidden_size, dtype=torch.float64)
        self._num_pairs = 0

    def add(self, batch: Batch, embed: torch.Tensor, gain: torch.Tensor) -> None:
        """Count the pairs of a batch. `gain` [E] is the weight of the target's final norm, which is divided out."""
        kept = batch.is_pair
        parts = [*batch.features[kept].chunk(self._num_features, dim=-1), embed[batch.token_ids[kept]].float()]
        inputs = torch.cat([functional.rms_norm(part, (self._size,), None, self._eps) for part in parts], dim=-1)
        self._inputs += inputs.T @ inputs
        self._products += inputs.T @ (batch.states[kept] / gain)
        self._num_pairs += len(inputs)

    def solve(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The scale of each input [A * E], one behind its root mean square, and the weights [E, (A + 1) * E] of all.

        The last E weights, those of the embedding, apply to it unscaled.
        """
        scale = (self._inputs.diagonal() / self._num_pairs).clamp(min=1e-12).rsqrt()
        scaled = self._inputs * scale * scale[:, None]
        scaled.diagonal().add_(RIDGE * self._num_pairs)
        weights = torch.linalg.solve(scaled, self._products * scale[:, None]).T
        end = self._num_features * self._size
        weights[:, end:] *= scale[end:]
        return scale[:end].float(), weights.float()

    @property
    def embedding_covariance(self) -> torch.Tensor:
        """[E, E] mean products of the normalised embedding's dimensions."""
        end = self._num_features * self._size
        return (self._inputs[end:, end:] / self._num_pairs).float()


@torch.no_grad()
def initialise(module: Eagle3Module, batches: Iterable[Batch], embed: torch.Tensor, gain: torch.Tensor) -> None:
    """Set the weights of `module` to the best linear guess over the batches. `embed` [V, E], `gain` [E] as above."""
    architecture = module.architecture
    layer, size = architecture.layer, architecture.layer.hidden_size
    regression = Regression(len(architecture.feature_layers), size, layer.rms_norm_eps)
    for batch in batches:
        regression.add(batch, embed, gain)
    scale, weights = regression.solve()
    for i, part in enumerate(scale.split(size)):
        module.weight(f"fc_norm.{i}").copy_(part)
    module.weight("fc").copy_(weights[:, :-size])
    module.weight("norm").copy_(gain)
    module.weight("layers.0.mlp.down_proj").zero_()
    _look_at_oneself(module)
    values = module.weight("layers.0.self_attn.v_proj")
    left, right = _low_rank(weights[:, -size:], regression.embedding_covariance, len(values))
    values.zero_()
    values[: len(right), :size] = right
    output = module.weight("layers.0.self_attn.o_proj")
    output.mul_(0.1)
    group = layer.num_heads // layer.num_kv_heads
    for head in range(layer.num_kv_heads):
        columns = slice(head * layer.head_size, (head + 1) * layer.head_size)
        first = head * group * layer.head_size
        part = left[:, columns]
        output[:, first : first + layer.head_size] = functional.pad(part, (0, layer.head_size - part.shape[1]))


def _look_at_oneself(module: Eagle3Module) -> None:
    """The first query head of each key head gets its key's projection: nothing is more like a pair than itself."""
    layer = module.architecture.layer
    queries, keys = module.weight("layers.0.self_attn.q_proj"), module.weight("layers.0.self_attn.k_proj")
    # Keys of unit inputs: rows of length 1, D of them, a score of D * E * spread^2 / sqrt(D) for the embedding alone.
    keys[:, layer.hidden_size :] *= 0.3
    spread = (SELF_SCORE / (layer.head_size**0.5 * layer.hidden_size)) ** 0.5
    keys.mul_(spread / keys[:, : layer.hidden_size].std())
    group = layer.num_heads // layer.num_kv_heads
    for head in range(layer.num_kv_heads):
        source = keys[head * layer.head_size : (head + 1) * layer.head_size]
        first = head * group * layer.head_size
        queries[first : first + layer.head_size] = source


def _low_rank(weight: torch.Tensor, covariance: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors [E, r] and [r, E] of the matrix of rank r closest to `weight` [E, E] on inputs of this covariance."""
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp(min=1e-8).sqrt()
    left, scale, right = torch.linalg.svd(weight @ root, full_matrices=False)
    rank = min(rank, len(scale))
    back = right[:rank] @ torch.linalg.pinv(root)
    return left[:, :rank] * scale[:rank].sqrt(), scale[:rank].sqrt()[:, None] * back
