"""Verification: which of a draft's guesses the target itself would have said.

The target's own next token is known at every node of the draft tree (`target.sampling`). A child is accepted if and
only if it *is* that token. The first node without such a child ends the walk, and its token is the step's last, the
bonus token. Nothing else is ever compared: no probabilities, no random number beyond the coupled noise, so greedy and
sampled decoding are one path and the draft cannot change the outcome.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draft.tree import Draft


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a step decided for one sequence."""

    path: tuple[int, ...]
    """Accepted nodes of the draft, in order of depth."""
    token_ids: tuple[int, ...]
    """The accepted tokens, then the bonus token: at least one."""


def walk(draft: Draft, choices: Sequence[int]) -> Verdict:
    """Follow the target's choices through the draft.

    `choices` [1 + n]: the target's next token at the root (the last committed token), then at each of the n nodes.
    """
    children: dict[tuple[int, int], int] = {}
    for node in reversed(range(len(draft))):  # of equal siblings the first counts
        children[draft.parents[node], draft.token_ids[node]] = node
    path: list[int] = []
    token_ids = [choices[0]]
    accepted = children.get((-1, choices[0]))
    while accepted is not None:
        path.append(accepted)
        token_ids.append(choices[1 + accepted])
        accepted = children.get((accepted, choices[1 + accepted]))
    return Verdict(tuple(path), tuple(token_ids))
