"""A draft while it grows: level by level, where a guess may still be worth having (EAGLE-2, arXiv 2406.16858)."""

from __future__ import annotations

from collections.abc import Sequence

from draft.tree import Draft

TREE_WIDTH = 8
"""Guesses behind one node, and nodes of one level that get guesses."""


class GrowingTree:
    """Guesses for one sequence, of which the likeliest `limit` become its draft.

    A path's chance is the product of its nodes' chances, so no node is likelier than its parent, and the likeliest
    nodes are always a tree. Nodes that cannot be among them are not grown further.
    """

    def __init__(
        self,
        *,
        limit: int,
        depth: int,
        width: int,
        min_chance: float,
        stops: frozenset[int],
        min_reach: float = 0.0,
    ) -> None:
        """At most `limit` nodes, `depth` deep, `width` (1 is a chain) wide. Paths less likely than `min_chance` end.

        Nothing is guessed behind the tokens `stops`, nor behind a level that is less likely than `min_reach`.
        """
        self._limit = limit
        self._width = width
        self._depth = min(depth, limit)
        self._min_chance = min_chance
        self._min_reach = min_reach
        self._stops = stops
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.chances: list[float] = []
        self._level = 0
        self._num_grown = 0
        self._newest = 0
        """Where the newest level begins."""

    @property
    def width(self) -> int:
        return self._width

    @property
    def depth(self) -> int:
        return self._depth

    def grow(self, children: Sequence[tuple[int, Sequence[int], Sequence[float]]]) -> None:
        """The next level: for each parent (-1 the root) token ids and how likely each is there, likeliest first."""
        self._newest = len(self.token_ids)
        self._level += 1
        for parent, token_ids, chances in children:
            reached = self.chances[parent] if parent >= 0 else 1.0
            for token_id, chance in zip(token_ids, chances, strict=True):
                # The first guess is kept however unlikely: whether it pays is not decided here.
                if not self.token_ids or (chance > 0.0 and reached * chance >= self._min_chance):
                    self.token_ids.append(token_id)
                    self.parents.append(parent)
                    self.chances.append(reached * chance)

    def grow_along(self, levels: Sequence[tuple[Sequence[int], Sequence[float]]]) -> None:
        """Level after level, each behind the likeliest guess of the one before: token ids and how likely each is.

        As many of each as the tree is wide.
        """
        parent = -1
        for token_ids, chances in levels:
            self.grow([(parent, token_ids[: self._width], chances[: self._width])])
            if self._newest == len(self.token_ids):
                return
            parent = self._newest

    def next_nodes(self) -> list[int]:
        """The nodes of the newest level behind which to guess, `limit` in all levels together; none at the end."""
        if self._level >= self._depth:
            return []
        bound = sorted(self.chances, reverse=True)[self._limit - 1] if len(self.chances) >= self._limit else 0.0
        newest = [
            node
            for node in range(self._newest, len(self.token_ids))
            if self.token_ids[node] not in self._stops and self.chances[node] >= max(bound, self._min_chance)
        ]
        room = min(self._width, self._limit - self._num_grown)
        best = sorted(newest, key=lambda node: (-self.chances[node], node))[:room]
        if sum(self.chances[node] for node in best) < self._min_reach:
            return []
        self._num_grown += len(best)
        return sorted(best)

    def path(self, node: int) -> tuple[int, ...]:
        """The tokens from the root to the node."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.token_ids[node])
            node = self.parents[node]
        return tuple(reversed(tokens))

    def draft(self, source: str) -> Draft:
        """The likeliest `limit` nodes."""
        ranked = sorted(range(len(self.token_ids)), key=lambda node: (-self.chances[node], node))
        whole = Draft(tuple(self.token_ids), tuple(self.parents), source, tuple(self.chances))
        return whole.keep(sorted(ranked[: self._limit]))
