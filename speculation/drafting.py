"""Drafting: what the engine asks the roster of proposers for, under the draft-length controller, step by step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from time import perf_counter

import torch

from draft.config import single_configs
from draft.proposer import DraftContext, Features
from draft.roster import Roster
from draft.tree import Draft
from speculation.controller import DraftLengthController
from speculation.cost_model import StepLoad
from speculation.sequence import Sequence
from target.batch import MAX_TREE_SIZE


class Drafting:
    """One step: `propose`, then `observe` and `commit` for each sequence, then `end`. Never mutates a sequence."""

    def __init__(self, roster: Roster, controller: DraftLengthController, *, hidden_size: int) -> None:
        """`hidden_size` is the target's: features come in columns of so many."""
        self._roster = roster
        self._controller = controller
        self._hidden_size = hidden_size
        self._feature_layers = roster.all_feature_layers
        self._seconds = 0.0
        self._layers: dict[int, tuple[int, ...]] = {}
        """Of each sequence the layers of whose features its proposers learn."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers whose hidden states a batch must bring, for all proposers together."""
        return self._feature_layers

    def start(self, sequence: Sequence) -> None:
        """A sequence has been taken in; its config is resolved."""
        self._roster.start(
            sequence.seq_id,
            sequence.config,
            sequence.token_ids,
            cache_salt=sequence.request.cache_salt,
            prediction=sequence.request.prediction_token_ids,
        )
        self._layers[sequence.seq_id] = self._roster.feature_layers(sequence.config)

    def wants_features(self, sequence: Sequence) -> bool:
        """Whether some proposer of the sequence learns of features."""
        return bool(self._layers[sequence.seq_id])

    def propose(self, ready: Seq[Sequence], num_other_rows: int = 0, num_others: int = 0) -> dict[int, Draft]:
        """Drafts by seq_id for all that are `ready`, one row each.

        `num_other_rows` rows of this step belong to others, and so many sequences are not ready yet.

        The draft length is the controller's; numbers that a config gives explicitly are taken as they stand.
        """
        started = perf_counter()
        drafts: dict[int, Draft] = {}
        contexts: list[DraftContext] = []
        most: list[int] = []
        if ready:
            num_tokens = sum(sequence.num_tokens for sequence in ready)
            self._controller.begin(StepLoad(len(ready), num_tokens, num_tokens), num_other_rows, num_others)
        for sequence in ready:
            if not single_configs(sequence.config):
                drafts[sequence.seq_id] = Draft.none("disabled")
            elif sequence.num_remaining_tokens <= 1:
                drafts[sequence.seq_id] = Draft.none("last_token")
            elif self._controller.rests(sequence.seq_id):
                drafts[sequence.seq_id] = Draft.none("does_not_pay")
            else:
                contexts.append(_context(sequence))
                most.append(MAX_TREE_SIZE)
        if contexts:
            proposed = self._controller.trim(contexts, self._roster.propose(contexts, most, self._controller))
            drafts.update((context.seq_id, draft) for context, draft in zip(contexts, proposed, strict=True))
        self._seconds = perf_counter() - started
        self._controller.note_all_drafting(self._seconds)
        return drafts

    def observe(self, sequence: Sequence, draft: Draft, path: tuple[int, ...]) -> None:
        """The target followed the nodes of `path`, and none behind them."""
        self._controller.observe(sequence.seq_id, draft, path)

    def commit(self, sequence: Sequence, token_ids: list[int], features: Features | None) -> None:
        """`token_ids` were appended; `features` have the columns of all layers."""
        layers = self._layers[sequence.seq_id]
        if not layers:
            features = None
        elif features is not None and layers != self._feature_layers:
            blocks = torch.split(features.states, self._hidden_size, dim=1)
            mine = torch.cat([blocks[self._feature_layers.index(layer)] for layer in layers], dim=1)
            features = Features(features.start, mine)
        if token_ids or features is not None:
            self._roster.commit(sequence.seq_id, token_ids, features)

    def saved_seconds(self, sequence: Sequence, draft: Draft, num_tokens: int) -> float:
        """Estimated time that guessing spared this sequence in this step, against one plain step a token."""
        was_ready = draft or draft.skipped is not None
        if not was_ready or not num_tokens or not single_configs(sequence.config):
            return 0.0
        return self._controller.saved_seconds(num_tokens)

    def end(self, load: StepLoad, *, num_tokens: int, step_seconds: float, is_pure: bool) -> None:
        """The step is over; see `DraftLengthController.end`. `step_seconds` includes drafting."""
        self._controller.end(load, num_tokens=num_tokens, seconds=step_seconds - self._seconds, is_pure=is_pure)

    def finish(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._roster.finish(sequence.seq_id)
        del self._layers[sequence.seq_id]
        self._controller.finish(sequence.seq_id)


def _context(sequence: Sequence) -> DraftContext:
    return DraftContext(
        seq_id=sequence.seq_id,
        token_ids=sequence.token_ids,
        num_prompt_tokens=sequence.num_prompt_tokens,
        sampling=sequence.sampling,
        config=sequence.config,
        cache_salt=sequence.request.cache_salt,
    )
