"""Predicted output: the client says what the answer will look like, and we follow it for as long as it does."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from draft.config import PredictionConfig, bounds_of
from draft.lives import Lives
from draft.proposer import DraftContext, Features
from draft.tree import Draft

RESYNC_ORDERS = (4, 2)
"""After a miss so many tokens must agree before the prediction is followed elsewhere, more first."""
NEARBY = 16
"""One token is enough where the prediction was lost at most so many tokens before."""


class PredictedText:
    """A predicted text and where in it the output stands.

    The output is followed token by token from the start. After a miss it is found again by its newest tokens: the next
    place where they stand behind the one that was lost, or else the last one before it.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = tuple(token_ids)
        self.position: int | None = 0
        """What is predicted to come next starts here; None while lost."""
        self.match_length = 0
        """Newest output tokens that agree with the prediction."""
        self._lost_at = 0
        self._newest: deque[int] = deque(maxlen=max(RESYNC_ORDERS))
        self._places: dict[tuple[int, ...], list[int]] = {}
        for n in RESYNC_ORDERS:
            for end in range(n, len(self.token_ids) + 1):
                self._places.setdefault(self.token_ids[end - n : end], []).append(end)

    def follow(self, token_id: int) -> None:
        """The output goes on with this token. Amortised O(1)."""
        self._newest.append(token_id)
        if self.position is not None:
            if self.token_ids[self.position : self.position + 1] == (token_id,):
                self.position += 1
                self.match_length += 1
                return
            self._lost_at, self.position = self.position, None
        self._find()

    def _find(self) -> None:
        newest = tuple(self._newest)
        for n in RESYNC_ORDERS:
            places = self._places.get(newest[-n:], []) if len(newest) >= n else []
            if places:
                behind = bisect_left(places, self._lost_at)
                self.position, self.match_length = places[min(behind, len(places) - 1)], n
                return
        nearby = self.token_ids[self._lost_at : self._lost_at + NEARBY]
        if newest[-1] in nearby:
            self.position, self.match_length = self._lost_at + nearby.index(newest[-1]) + 1, 1


class PredictionProposer:
    """Drafts what the request's predicted output says comes next (OpenAI's `prediction`)."""

    name = "prediction"
    needs_features: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._lives: Lives[PredictedText | None] = Lives()

    def start(
        self, seq_id: int, prompt_token_ids: Sequence[int], *, cache_salt: str = "", prediction: Sequence[int] = ()
    ) -> None:
        """A sequence begins, with a predicted output or without. Raises ValueError if it has begun already."""
        self._lives.start(seq_id, PredictedText(prediction) if prediction else None, len(prompt_token_ids))

    def propose(self, contexts: Sequence[DraftContext], limits: Sequence[int]) -> list[Draft]:
        """A chain for each context that stands somewhere in its prediction."""
        return [self._propose_one(context, limit) for context, limit in zip(contexts, limits, strict=True)]

    def _propose_one(self, context: DraftContext, limit: int) -> Draft:
        text, config = self._lives.asked(context, PredictionConfig)
        if text is None or text.position is None or text.position >= len(text.token_ids):
            return Draft.none("no_match", self.name)
        end = text.position + min(limit, bounds_of(config).num_nodes)
        return Draft.chain(text.token_ids[text.position : end], self.name, match_length=text.match_length)

    def commit(self, seq_id: int, token_ids: Sequence[int], features: Features | None) -> None:
        """Tokens were appended. Raises ValueError for an unknown sequence."""
        text = self._lives.commit(seq_id, len(token_ids))
        if text is not None:
            for token_id in token_ids:
                text.follow(token_id)

    def finish(self, seq_id: int) -> None:
        """The sequence and its prediction are forgotten. Raises ValueError for an unknown sequence."""
        self._lives.finish(seq_id)
