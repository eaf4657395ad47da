"""Suffix decoding: the longer the newest tokens stood somewhere before, the further we copy what followed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil

from draft.config import SuffixConfig, bounds_of
from draft.corpus import Corpus, Occurrence
from draft.lives import Lives
from draft.proposer import DraftContext, Features
from draft.tree import Draft

OWN_ORDERS = (8, 4, 2, 1)
SHARED_ORDERS = (8, 4, 2)
"""A single token of somebody else's text says nothing."""
MAX_OCCURRENCES = 16
"""Occurrences that vote, the latest ones, of the sequence and of the shared corpus each."""


@dataclass(slots=True)
class _Life:
    """What is kept of one sequence between `start` and `finish`."""

    cache_salt: str
    output_token_ids: list[int] = field(default_factory=list)
    text: Corpus | None = None
    num_indexed: int = 0

    def catch_up(self, token_ids: Sequence[int]) -> Corpus:
        """The index of the sequence's own text, complete. It grows by doubling: amortised O(1) a token."""
        if self.text is None or len(token_ids) > self.text.capacity:
            with_room = len(token_ids) * 3 // 2 + 128
            self.text = Corpus(2 ** with_room.bit_length(), OWN_ORDERS)
            self.num_indexed = 0
        self.text.extend(token_ids[self.num_indexed :])
        self.num_indexed = len(token_ids)
        return self.text


class VotedTree:
    """The continuations of several occurrences merged into a tree, the most likely path first.

    At depth d an occurrence that matched m tokens has m + d votes (had the path been taken, it would match so many),
    and what was never seen has one. A node's confidence is its parent's times its share of the votes.
    """

    def __init__(self, num_nodes: int, min_confidence: float, *, is_chain: bool) -> None:
        self._num_nodes = num_nodes
        self._min_confidence = min_confidence
        self._is_chain = is_chain
        self._frontier: list[tuple[float, int, int, int, list[Occurrence]]] = []
        self._num_pushed = 0
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.confidences: list[float] = []

    def grow(self, occurrences: list[Occurrence], depth: int) -> None:
        """Add nodes, down to `depth`, until the size or the confidence is reached."""
        depths = {-1: 0}
        self._push_children(-1, 1.0, 0, occurrences)
        while self._frontier and len(self.token_ids) < self._num_nodes:
            negated, _, parent, token_id, voters = heappop(self._frontier)
            node = len(self.token_ids)
            self.token_ids.append(token_id)
            self.parents.append(parent)
            self.confidences.append(-negated)
            depths[node] = depths[parent] + 1
            if depths[node] < depth:
                self._push_children(node, -negated, depths[node], voters)

    def _push_children(self, parent: int, confidence: float, depth: int, voters: list[Occurrence]) -> None:
        groups: dict[int, list[Occurrence]] = {}
        for voter in voters:
            if len(voter.continuation) > depth:
                groups.setdefault(voter.continuation[depth], []).append(voter)
        votes = {token_id: sum(v.match_length + depth for v in group) for token_id, group in groups.items()}
        total = 1 + sum(votes.values())
        chosen = [max(votes, key=votes.__getitem__)] if self._is_chain and votes else votes
        for token_id in chosen:
            share = confidence * votes[token_id] / total
            if share >= self._min_confidence:
                self._num_pushed += 1  # among equals the one seen last comes first
                heappush(self._frontier, (-share, self._num_pushed, parent, token_id, groups[token_id]))


class SuffixProposer:
    """SuffixDecoding [Oliaro et al., arXiv 2411.04975] over the sequence itself and over finished responses.

    The longest suffix of the sequence that occurred before is looked up; what followed its occurrences is merged into a
    tree and drafted best path first, up to `length_factor` times the match length deep and down to `min_confidence`.
    Finished responses go to a corpus of `corpus_capacity` tokens for all salts together, which forgets the oldest
    first; a sequence sees those of its own `cache_salt` alone. Sequences that never ask cost next to nothing.
    """

    name = "suffix"
    needs_features: tuple[int, ...] = ()

    def __init__(self, corpus_capacity: int) -> None:
        self.corpus = Corpus(corpus_capacity, SHARED_ORDERS)
        self._lives: Lives[_Life] = Lives()

    def start(
        self, seq_id: int, prompt_token_ids: Sequence[int], *, cache_salt: str = "", prediction: Sequence[int] = ()
    ) -> None:
        """A sequence begins. Raises ValueError if it has begun already."""
        self._lives.start(seq_id, _Life(cache_salt), len(prompt_token_ids))

    def propose(self, contexts: Sequence[DraftContext], limits: Sequence[int]) -> list[Draft]:
        """A tree (a chain, where the config says so) for each context whose newest tokens occurred before."""
        return [self._propose_one(context, limit) for context, limit in zip(contexts, limits, strict=True)]

    def _propose_one(self, context: DraftContext, limit: int) -> Draft:
        life, config = self._lives.asked(context, SuffixConfig)
        bounds = bounds_of(config)
        depth = min(bounds.depth, limit)
        occurrences = life.catch_up(context.token_ids).occurrences(context.token_ids, depth, MAX_OCCURRENCES)
        newest = context.token_ids[-16:]
        occurrences += self.corpus.occurrences(newest, depth, MAX_OCCURRENCES, life.cache_salt)
        if not occurrences:
            return Draft.none("no_match", self.name)
        match_length = max(occurrence.match_length for occurrence in occurrences)
        voters = [occurrence for occurrence in occurrences if 2 * occurrence.match_length > match_length]
        tree = VotedTree(min(limit, bounds.num_nodes), config.min_confidence, is_chain=bounds.is_chain)
        tree.grow(voters, min(depth, ceil(_length_factor(config) * match_length)))
        if not tree.token_ids:
            return Draft.none("no_match", self.name)
        return Draft(tuple(tree.token_ids), tuple(tree.parents), self.name, tuple(tree.confidences), match_length)

    def commit(self, seq_id: int, token_ids: Sequence[int], features: Features | None) -> None:
        """Tokens were appended. Raises ValueError for an unknown sequence."""
        self._lives.commit(seq_id, len(token_ids)).output_token_ids.extend(token_ids)

    def finish(self, seq_id: int) -> None:
        """The response goes to the shared corpus, the rest is forgotten. Raises ValueError for an unknown sequence."""
        life = self._lives.finish(seq_id)
        if life.output_token_ids:
            self.corpus.add(life.output_token_ids, life.cache_salt)

    def check_integrity(self) -> str | None:
        """The first inconsistency found in the shared corpus, or None. Takes seconds: for tests and idle times."""
        return self.corpus.check_integrity()


def _length_factor(config: SuffixConfig) -> float:
    if config.length_factor != "auto":
        return config.length_factor
    return 2.0 if bounds_of(config).is_fixed else 8.0
