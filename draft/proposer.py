"""The seam between the engine and everything that guesses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from draft.config import SpeculationConfig
from draft.tree import Draft
from target.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class DraftContext:
    """One sequence that is ready for a guess, as a proposer sees it: views, not copies; nothing here may be changed."""

    seq_id: int
    token_ids: Sequence[int]
    """All committed tokens, prompt and output."""
    num_prompt_tokens: int
    sampling: SamplingParams
    config: SpeculationConfig
    cache_salt: str = ""
    """Tenants with different salts must not learn of one another's text through what gets accepted."""
    min_confidence: float = 0.0
    """A path less likely than this does not pay verifying. A proposer that knows its confidences need not draft it."""
    min_reach: float = 0.0
    """Behind paths that together are less likely than this, one more level of guesses does not pay drafting."""


class Features(NamedTuple):
    """Hidden states of consecutive committed tokens of one sequence, just computed by the target."""

    start: int
    """Index in the sequence of the first token they belong to. After a preemption tokens are computed again, and after
    a prefix hit they begin behind it, so it need not be where the last ones ended."""
    rows: torch.Tensor
    """[rows, len(needs_features) * hidden size] of a step, those of other sequences among them; of memory that no later
    step writes to: a proposer may keep it, and with it all rows."""
    first: int = 0
    """Of the rows, those in [first, end) are this sequence's; `end` None: up to the last."""
    end: int | None = None

    @property
    def num_tokens(self) -> int:
        """That they belong to."""
        return (self.rows.size(0) if self.end is None else self.end) - self.first

    @property
    def states(self) -> torch.Tensor:
        """[num_tokens, columns], a view of the step's."""
        return self.rows[self.first : self.end]


class Proposer(Protocol):
    """Guesses the target's next tokens for a batch of sequences. Never mutates a sequence.

    Life of a sequence: `start`, then any number of `propose` and `commit` in turn, then `finish`. Verbs out of order
    raise `ValueError`. A preempted sequence is not finished: it is silent for a while.
    """

    name: str
    needs_features: tuple[int, ...]
    """Layers whose hidden states it wants of every committed token (see `ForwardBatch.feature_layers`); () for none."""

    def start(
        self, seq_id: int, prompt_token_ids: Sequence[int], *, cache_salt: str = "", prediction: Sequence[int] = ()
    ) -> None:
        """A sequence begins. `prediction` is text the client expects in the answer (OpenAI's predicted output)."""

    def propose(self, contexts: Sequence[DraftContext], limits: Sequence[int]) -> list[Draft]:
        """One draft a context, in order, of at most `limits[i]` (> 0) nodes; empty drafts say why."""

    def commit(self, seq_id: int, token_ids: Sequence[int], features: Features | None) -> None:
        """`token_ids` were appended to the sequence.

        `features`, if asked for: those of the committed tokens that were computed in this step, in order, the last of
        which is the token *before* the newest (the newest has not been through the target yet). During prefill it is
        called with no tokens and the features of the chunk just computed.
        """

    def finish(self, seq_id: int) -> None:
        """The sequence has ended, for whatever reason; forget it (a corpus of finished responses may keep its text)."""
