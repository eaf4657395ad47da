"""Medusa as proposer: the likeliest paths through the guesses of independent heads (Cai et al., arXiv 2401.10774)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draft.candidates import Candidates, best_candidates
from draft.config import MedusaConfig, bounds_of
from draft.growing import TREE_WIDTH, GrowingTree
from draft.growth import token_counts
from draft.lives import Lives
from draft.medusa_heads import MedusaHeads
from draft.proposer import DraftContext, Features
from draft.tree import Draft
from target.sampling import SamplingRow


@dataclass(slots=True)
class _LastState:
    """The newest hidden state of a sequence."""

    index: int = -1
    """Of its token."""
    state: torch.Tensor | None = None
    """[E]"""


class MedusaProposer:
    """Drafts for all sequences together in one forward of the heads, which know nothing of one another's guesses.

    A path's chance is therefore the product of its guesses' chances, and a draft the tree of the likeliest paths.
    """

    name = "medusa"
    needs_features: tuple[int, ...] = (-1,)

    def __init__(self, heads: MedusaHeads, *, eos_token_ids: tuple[int, ...]) -> None:
        """`eos_token_ids` are the target's."""
        self._heads = heads
        self._eos_token_ids = eos_token_ids
        self._lives: Lives[_LastState] = Lives()

    def start(
        self, seq_id: int, prompt_token_ids: Sequence[int], *, cache_salt: str = "", prediction: Sequence[int] = ()
    ) -> None:
        """Raises ValueError for a sequence that is here already."""
        self._lives.start(seq_id, _LastState(), len(prompt_token_ids))

    def commit(self, seq_id: int, token_ids: Sequence[int], features: Features | None) -> None:
        """The newest feature is all that is kept."""
        last = self._lives.commit(seq_id, len(token_ids))
        if features is not None and features.num_tokens:
            last.index, last.state = features.start + features.num_tokens - 1, features.states[-1].clone()

    def finish(self, seq_id: int) -> None:
        """Nothing of the sequence is kept."""
        self._lives.finish(seq_id)

    def propose(self, contexts: Sequence[DraftContext], limits: Sequence[int]) -> list[Draft]:
        """Trees of at most `limits[i]` nodes, no deeper than there are heads."""
        ready: list[tuple[int, torch.Tensor]] = []
        trees: list[GrowingTree] = []
        drafts = [Draft.none("not_ready", self.name) for _ in contexts]
        for i, (context, limit) in enumerate(zip(contexts, limits, strict=True)):
            last, config = self._lives.asked(context, MedusaConfig)
            if last.state is not None and last.index == len(context.token_ids) - 2:
                ready.append((i, last.state))
                trees.append(self._tree(context, config, limit))
        if not ready:
            return drafts
        depth = max(tree.depth for tree in trees)
        logits = self._heads.forward(torch.stack([state for _, state in ready]), depth)
        rows = [row for i, _ in ready for row in self._rows(contexts[i], depth)]
        width = max(tree.width for tree in trees)
        candidates = best_candidates(logits.flatten(0, 1), rows, self._heads.target_ids, width)
        for place, ((i, _), tree) in enumerate(zip(ready, trees, strict=True)):
            _grow(tree, candidates, place * depth)
            drafts[i] = tree.draft(self.name)
        return drafts

    def _tree(self, context: DraftContext, config: MedusaConfig, limit: int) -> GrowingTree:
        bounds = bounds_of(config)
        return GrowingTree(
            limit=limit,
            depth=min(bounds.depth, len(self._heads)),
            width=1 if bounds.is_chain else TREE_WIDTH,
            min_chance=context.min_confidence,
            stops=context.sampling.all_stop_token_ids(self._eos_token_ids),
        )

    def _rows(self, context: DraftContext, depth: int) -> list[SamplingRow]:
        """One a head. Penalties count committed tokens alone: a head does not know what is guessed before it."""
        counts = token_counts(context)
        stops = context.sampling.all_stop_token_ids(self._eos_token_ids)
        num_tokens = len(context.token_ids)
        return [
            SamplingRow.after(
                (),
                params=context.sampling,
                num_tokens=num_tokens + position,
                num_prompt_tokens=context.num_prompt_tokens,
                stop_token_ids=stops,
                counts=counts,
            )
            for position in range(depth)
        ]


def _grow(tree: GrowingTree, candidates: Candidates, first: int) -> None:
    """Every level of a tree; `first` is the row of its first head."""
    nodes, row = [-1], first
    while nodes:
        token_ids, chances = candidates.token_ids[row][: tree.width], candidates.chances[row][: tree.width]
        tree.grow([(node, token_ids, chances) for node in nodes])
        nodes, row = tree.next_nodes(), row + 1
