"""One draft of a model while it grows: which guesses have been through the model, and what it is asked next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice

import torch

from draft.candidates import best_candidates
from draft.config import bounds_of, single_configs
from draft.growing import TREE_WIDTH, GrowingTree
from draft.proposer import DraftContext
from target.layout import BatchEntry
from target.sampling import SamplingRow, TokenCounts


class Growth:
    """A tree behind one sequence, and its rows in a model's cache, behind those of committed tokens.

    Expanded nodes are those behind which was guessed, in the order in which they went through the model.
    """

    def __init__(self, context: DraftContext, *, limit: int, eos_token_ids: tuple[int, ...]) -> None:
        """At most `limit` nodes; a chain where the sequence's config says so. `eos_token_ids` are the target's."""
        self.context = context
        self.limit = limit
        self.bounds = bounds = bounds_of(single_configs(context.config)[0])
        self.stops = context.sampling.all_stop_token_ids(eos_token_ids)
        self._counts = token_counts(context)
        self.tree = GrowingTree(
            limit=limit,
            depth=bounds.depth,
            width=1 if bounds.is_chain else TREE_WIDTH,
            min_chance=context.min_confidence,
            min_reach=context.min_reach,
            stops=self.stops,
        )
        self.expanded: list[int] = []

    def entry(self, nodes: Sequence[int], num_cached: int, block_ids: Sequence[int]) -> BatchEntry:
        """What the model computes to guess behind `nodes`, the last rows; the cache holds `num_cached` committed ones.

        While the expanded nodes are a chain, those before are in the cache as if committed. Where they branch, all of
        them are computed again behind the last committed row, each seeing its own ancestors.
        """
        rows = [*self.expanded, *nodes]
        if len(self._chain_of(rows)) == len(rows):
            start = num_cached + len(self.expanded)
            return BatchEntry(start, [self.tree.token_ids[nodes[0]]], block_ids, logits_from=0)
        place = {-1: -1} | {node: i for i, node in enumerate(rows)}
        return BatchEntry(
            num_cached - 1,
            self.context.token_ids[-1:],
            block_ids,
            tree=[self.tree.token_ids[node] for node in rows],
            parents=[place[self.tree.parents[node]] for node in rows],
            logits_from=1 + len(self.expanded),
        )

    @property
    def cached_token_ids(self) -> tuple[int, ...]:
        """The guesses that stand in the cache as they would if they were committed, from the first on."""
        return tuple(self.tree.token_ids[node] for node in self._chain_of(self.expanded))

    def sampling_row(self, node: int) -> SamplingRow:
        """The row that follows the node, -1 being the newest committed token."""
        return SamplingRow.after(
            self.tree.path(node),
            params=self.context.sampling,
            num_tokens=len(self.context.token_ids),
            num_prompt_tokens=self.context.num_prompt_tokens,
            stop_token_ids=self.stops,
            counts=self._counts,
        )

    def _chain_of(self, rows: Sequence[int]) -> list[int]:
        """The first of the nodes, as long as each is the child of the one before."""
        chain = [-1]
        for node in rows:
            if self.tree.parents[node] != chain[-1]:
                break
            chain.append(node)
        return chain[1:]


def grow(growing: Sequence[tuple[Growth, Sequence[int]]], logits: torch.Tensor, target_ids: torch.Tensor) -> None:
    """One more level of each tree, behind the given nodes, whose logits [R, C] of `target_ids` [C] stand in order."""
    rows = [growth.sampling_row(node) for growth, nodes in growing for node in nodes]
    width = max(growth.tree.width for growth, _ in growing)
    candidates = best_candidates(logits, rows, target_ids, width)
    guesses = iter(zip(candidates.token_ids, candidates.chances, strict=True))
    for growth, nodes in growing:
        own = growth.tree.width
        found = zip(nodes, islice(guesses, len(nodes)), strict=True)
        growth.tree.grow([(node, token_ids[:own], chances[:own]) for node, (token_ids, chances) in found])


def token_counts(context: DraftContext) -> TokenCounts | None:
    """How often tokens occur in the sequence, where penalties need it."""
    if not context.sampling.has_penalties:
        return None
    prompt, output = (
        context.token_ids[: context.num_prompt_tokens],
        context.token_ids[context.num_prompt_tokens :],
    )
    return TokenCounts(frozenset(prompt), Counter(output))
