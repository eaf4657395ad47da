"""The draft: a tree of guessed tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Draft:
    """Guesses for one sequence, as a tree in topological order.

    Node i guesses `token_ids[i]` after the path that ends in node `parents[i]`, or, where that is -1, directly after
    the sequence's last committed token. `parents[i] < i`. A chain has parents -1, 0, 1, 2, … An empty draft carries
    the reason it is empty.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    source: str = ""
    """The method that guessed, as users know it (`ngram`, `draft_model`, …)."""
    confidences: tuple[float, ...] | None = None
    """For each node the proposer's own estimate that the target follows the path to and including it, if it has one."""
    match_length: int = 0
    """For lookup: how many tokens of context the guess rests on."""
    skipped: str | None = None
    """Why there is nothing here: one of `SKIP_REASONS`. None for a draft that has nodes."""

    @classmethod
    def chain(
        cls,
        token_ids: tuple[int, ...],
        source: str,
        *,
        match_length: int = 0,
        confidences: tuple[float, ...] | None = None,
    ) -> Draft:
        """A draft without branches."""
        return cls(token_ids, tuple(range(-1, len(token_ids) - 1)), source, confidences, match_length)

    @staticmethod
    @lru_cache(maxsize=256)
    def none(reason: str, source: str = "") -> Draft:
        """No guess, and why."""
        if reason not in SKIP_REASONS:
            raise ValueError(f"unknown skip reason {reason!r}; one of {sorted(SKIP_REASONS)}")
        return Draft(source=source, skipped=reason)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def depths(self) -> tuple[int, ...]:
        """[n] each node's distance from the last committed token, the first guesses being at 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @property
    def is_chain(self) -> bool:
        """Whether every node is the child of the one before it."""
        return all(b == a + 1 for a, b in pairwise((-2, *self.parents))) if self.parents else True

    def trim(self, num_nodes: int, max_depth: int | None = None) -> Draft:
        """The first `num_nodes` nodes no deeper than `max_depth`: a prefix of a topological order is a tree."""
        if num_nodes >= len(self) and (max_depth is None or max_depth >= len(self)):
            return self
        depths = self.depths
        return self.keep(
            [i for i in range(len(self)) if max_depth is None or depths[i] <= max_depth][: max(num_nodes, 0)]
        )

    def keep(self, nodes: Sequence[int]) -> Draft:
        """The tree of these nodes, given in ascending order, each with its parent among them. Empty says no reason."""
        if len(nodes) == len(self):
            return self
        renumbered = {old: new for new, old in enumerate(nodes)} | {-1: -1}
        return Draft(
            tuple(self.token_ids[i] for i in nodes),
            tuple(renumbered[self.parents[i]] for i in nodes),
            self.source,
            None if self.confidences is None else tuple(self.confidences[i] for i in nodes),
            self.match_length,
        )


SKIP_REASONS = frozenset(
    {
        "disabled",  # the request asked for no speculation
        "no_match",  # lookup found nothing to continue
        "does_not_pay",  # the draft-length controller expects no gain
        "no_blocks",  # the KV pool had no room for guesses
        "token_budget",  # the step's token budget was spent on committed tokens
        "too_long",  # the draft model's context is shorter than the sequence
        "measuring",  # the draft-length controller wants to know what a step without guesses takes
        "last_token",  # one token is left to generate: nothing to guess behind it
        "not_ready",  # the proposer lacks something it needs (features not in the cache, its own prefill)
    }
)
"""Every way a draft can be empty; counted and reported, never silence."""
