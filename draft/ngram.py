"""Prompt lookup: what followed the last occurrence of the newest tokens follows again."""

from __future__ import annotations

from collections.abc import Sequence

from draft.config import NgramConfig
from draft.lives import Lives
from draft.proposer import DraftContext, Features
from draft.tree import Draft


class NgramIndex:
    """For every n asked of it, where each n-gram of one growing sequence was last continued.

    The index catches up with the sequence when it is asked, so a token costs one dictionary entry for each n, once,
    and a sequence that nobody asks about costs nothing. An n-gram enters when the token behind it is known: what is
    found always has a continuation, and the newest n-gram never finds itself.
    """

    def __init__(self) -> None:
        self._continuations: dict[int, dict[tuple[int, ...], int]] = {}
        self._num_indexed: dict[int, int] = {}

    @property
    def num_entries(self) -> int:
        """Entries held, at most one a token and n."""
        return sum(map(len, self._continuations.values()))

    def longest_match(self, token_ids: Sequence[int], min_n: int, max_n: int) -> tuple[int, int]:
        """Length of the longest n-gram at the end of `token_ids` seen before, and the position behind its latest sight.

        (0, 0) if there is none. `token_ids` must extend what the index was asked about before.
        """
        num_tokens = len(token_ids)
        for n in range(min(max_n, num_tokens - 1), min_n - 1, -1):
            position = self._catch_up(token_ids, n).get(tuple(token_ids[num_tokens - n :]))
            if position is not None:
                return n, position
        return 0, 0

    def _catch_up(self, token_ids: Sequence[int], n: int) -> dict[tuple[int, ...], int]:
        """The table of n-grams, complete up to the one that ends before the newest token."""
        continuations = self._continuations.setdefault(n, {})
        first = self._num_indexed.get(n, n)
        fresh = token_ids[first - n : -1]
        grams = zip(*(fresh[i:] for i in range(n)), strict=False)
        continuations.update(zip(grams, range(first, len(token_ids)), strict=True))
        self._num_indexed[n] = len(token_ids)
        return continuations


def copy_from(token_ids: Sequence[int], position: int, num_tokens: int) -> tuple[int, ...]:
    """`num_tokens` tokens from `position` on; past the end the copy goes on with itself, as if it had been appended."""
    copied = tuple(token_ids[position : position + num_tokens])
    if len(copied) == num_tokens:
        return copied
    num_repeats = -(-num_tokens // len(copied))
    return (copied * num_repeats)[:num_tokens]


class NgramProposer:
    """Prompt lookup over prompt and output [Saxena, prompt-lookup-decoding]: longest match first, latest occurrence.

    `min_n` and `max_n` come from each request's `NgramConfig`. A match that overlaps the end of the sequence is a
    repetition, and is drafted as one.
    """

    name = "ngram"
    needs_features: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._lives: Lives[NgramIndex] = Lives()

    def start(
        self, seq_id: int, prompt_token_ids: Sequence[int], *, cache_salt: str = "", prediction: Sequence[int] = ()
    ) -> None:
        """A sequence begins. Raises ValueError if it has begun already."""
        self._lives.start(seq_id, NgramIndex(), len(prompt_token_ids))

    def propose(self, contexts: Sequence[DraftContext], limits: Sequence[int]) -> list[Draft]:
        """A chain for each context whose newest tokens stood in it before. Raises ValueError for unknown sequences."""
        return [self._propose_one(context, limit) for context, limit in zip(contexts, limits, strict=True)]

    def _propose_one(self, context: DraftContext, limit: int) -> Draft:
        index, config = self._lives.asked(context, NgramConfig)
        match_length, position = index.longest_match(context.token_ids, config.min_n, config.max_n)
        if not match_length:
            return Draft.none("no_match", self.name)
        return Draft.chain(copy_from(context.token_ids, position, limit), self.name, match_length=match_length)

    def commit(self, seq_id: int, token_ids: Sequence[int], features: Features | None) -> None:
        """Tokens were appended. Raises ValueError for an unknown sequence."""
        self._lives.commit(seq_id, len(token_ids))

    def finish(self, seq_id: int) -> None:
        """The sequence and its index are forgotten. Raises ValueError for an unknown sequence."""
        self._lives.finish(seq_id)
