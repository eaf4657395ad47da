"""What one forward of a model reads and gives back."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]

MAX_TREE_SIZE = 63
"""Most draft tokens of a sequence in one step: a tree mask is the bits of one int64, and its sign stays clear."""


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """A ragged batch: the new tokens of S sequences, laid end to end; T tokens in all, R of whose logits are wanted.

    The new tokens of one sequence are a *chain* (committed tokens whose keys and values are not in the pool yet: a
    prompt's chunk, or the one token sampled last) and, behind it, the nodes of its *draft tree*, in topological order.

        sequence s:   computed tokens            chain              draft tree
                      [0, num_computed[s])       chain_lens[s]      the rest of its rows

    A chain row sees the computed tokens and the chain up to itself. A tree row sees the computed tokens, the whole
    chain, and the tree rows whose bits are set in its `tree_masks` entry (its ancestors and itself). What a row sees
    in *logical* order (computed, chain, ancestors by depth) is exactly what it would see, in the same order, had its
    path been committed before: backends must reduce in that order, so that a row's result is bitwise the same.

    Everything is on the host; a runner moves it to its device in one copy.
    """

    token_ids: IntArray
    """[T]"""
    positions: IntArray
    """[T] absolute positions (a tree row's is its parent's plus one)."""
    slot_mapping: IntArray
    """[T] the slot each new token's key and value is written to; slot = block id * block size + offset."""
    row_starts: IntArray
    """[S + 1] sequence s owns rows [row_starts[s], row_starts[s + 1])."""
    num_computed: IntArray
    """[S] tokens of the sequence that are in the pool already."""
    chain_lens: IntArray
    """[S] committed tokens among the new ones, at least one."""
    tree_masks: IntArray
    """[T] for a tree row, bit i set if it sees its sequence's i-th tree row; 0 for a chain row."""
    block_tables: IntArray
    """[S, B] block ids; entry j holds logical indices [j * block_size, (j + 1) * block_size). Padded with 0, the null
    block. New token i of a sequence (chain or tree) stands at logical index num_computed + i."""
    logit_rows: IntArray
    """[R] rows whose logits are wanted, ascending."""
    feature_layers: tuple[int, ...] = ()
    """Layers whose output hidden state is wanted of every row, 0 being the embedding's output; -1 the last hidden
    state after the final norm (Medusa's features)."""


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """What a forward gives back, on the runner's device."""

    logits: torch.Tensor
    """[R, vocabulary] float32, of `logit_rows`."""
    features: torch.Tensor | None = field(default=None)
    """[T, len(feature_layers) * hidden size] float32: the asked hidden states of each row, concatenated."""
