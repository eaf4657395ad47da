"""Scripted proposers: an oracle, a liar, a coin and a bushy tree, to pin what the engine does with guesses."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from draft.proposer import DraftContext, Features
from draft.tree import Draft

SOURCE = "draft_model"
"""In whose place they stand."""

Truth = Callable[[DraftContext, int], list[int]]
"""What the target will say next, so many tokens of it."""


class Scripted:
    """Drafts what `script` returns for a context and a limit, and checks its own life cycle."""

    needs_features: tuple[int, ...] = ()

    def __init__(self, name: str, script: Callable[[DraftContext, int], Draft]) -> None:
        self.name = name
        self.script = script
        self.live: dict[int, list[int]] = {}
        self.drafts = 0

    def start(
        self, seq_id: int, prompt_token_ids: Sequence[int], *, cache_salt: str = "", prediction: Sequence[int] = ()
    ) -> None:
        assert seq_id not in self.live
        self.live[seq_id] = list(prompt_token_ids)

    def propose(self, contexts: Sequence[DraftContext], limits: Sequence[int]) -> list[Draft]:
        for context in contexts:
            assert self.live[context.seq_id] == list(context.token_ids), "the proposer missed committed tokens"
        self.drafts += len(contexts)
        return [self.script(context, limit) for context, limit in zip(contexts, limits, strict=True)]

    def commit(self, seq_id: int, token_ids: Sequence[int], features: Features | None) -> None:
        self.live[seq_id] += token_ids

    def finish(self, seq_id: int) -> None:
        del self.live[seq_id]


def oracle(truth: Truth) -> Callable[[DraftContext, int], Draft]:
    """Guesses right every time."""
    return lambda context, limit: Draft.chain(tuple(truth(context, limit)), SOURCE)


def liar(truth: Truth, vocab_size: int) -> Callable[[DraftContext, int], Draft]:
    """Guesses wrong every time."""
    return lambda context, limit: Draft.chain(
        tuple((token + 1) % vocab_size for token in truth(context, limit)), SOURCE
    )


def coin(truth: Truth, vocab_size: int, rng: random.Random) -> Callable[[DraftContext, int], Draft]:
    """Guesses each token right two times out of three."""

    def script(context: DraftContext, limit: int) -> Draft:
        tokens = [token if rng.random() < 2 / 3 else rng.randrange(vocab_size) for token in truth(context, limit)]
        return Draft.chain(tuple(tokens), SOURCE)

    return script


def bushy(truth: Truth, vocab_size: int, rng: random.Random) -> Callable[[DraftContext, int], Draft]:
    """A random tree with the truth somewhere in it, among duplicates and wrong branches."""

    def script(context: DraftContext, limit: int) -> Draft:
        true_tokens = truth(context, limit)
        token_ids: list[int] = []
        parents: list[int] = []
        true_node, depth = -1, 0
        while len(token_ids) < limit:
            if depth < len(true_tokens) and rng.random() < 0.5:
                token_ids.append(true_tokens[depth])
                parents.append(true_node)
                true_node, depth = len(token_ids) - 1, depth + 1
            else:
                token_ids.append(rng.randrange(vocab_size))
                parents.append(rng.randrange(-1, len(parents)))
        return Draft(tuple(token_ids), tuple(parents), SOURCE)

    return script
