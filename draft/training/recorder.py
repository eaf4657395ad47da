"""Recording what the target computes anyway: a proposer that never guesses, and keeps the features it is told of."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from draft.proposer import DraftContext, Features
from draft.training.feature_store import FeatureStore
from draft.tree import Draft


@dataclass(slots=True)
class _Recording:
    token_ids: list[int]
    num_prompt_tokens: int
    first: int = -1
    """Where its features begin: behind a prefix hit, or at 0; -1 while there are none."""
    chunks: list[npt.NDArray[np.float32]] = field(default_factory=list)
    end: int = 0


class FeatureRecorder:
    """Stores each sequence when it ends: the tokens from where its features begin, and these features.

    It takes the place of a proposer that learns of features (`name`), so the engine that serves also records.
    """

    def __init__(self, store: FeatureStore, *, name: str = "eagle3") -> None:
        self.name = name
        self.needs_features = store.form.layers
        self._store = store
        self._recordings: dict[int, _Recording] = {}

    def start(
        self, seq_id: int, prompt_token_ids: Sequence[int], *, cache_salt: str = "", prediction: Sequence[int] = ()
    ) -> None:
        """Raises ValueError for a sequence that is here already."""
        if seq_id in self._recordings:
            raise ValueError(f"sequence {seq_id} was started already")
        self._recordings[seq_id] = _Recording(list(prompt_token_ids), len(prompt_token_ids))

    def propose(self, contexts: Sequence[DraftContext], limits: Sequence[int]) -> list[Draft]:
        """Nothing, ever."""
        return [Draft.none("not_ready", self.name) for _ in contexts]

    def commit(self, seq_id: int, token_ids: Sequence[int], features: Features | None) -> None:
        """Keep the features that are new; those that a preemption makes the target compute again are not."""
        recording = self._recordings[seq_id]
        recording.token_ids += token_ids
        if features is None:
            return
        if not recording.chunks or features.start > recording.end:
            recording.first, recording.chunks, recording.end = features.start, [], features.start
        fresh = features.states[recording.end - features.start :]
        if len(fresh):
            recording.chunks.append(fresh.cpu().float().numpy().astype(np.float32))
            recording.end += len(fresh)

    def finish(self, seq_id: int) -> None:
        """The sequence goes to the store, unless nothing was computed for it."""
        recording = self._recordings.pop(seq_id)
        if not recording.chunks:
            return
        first = recording.first
        self._store.append(
            recording.token_ids[first:],
            np.concatenate(recording.chunks),
            num_prompt_tokens=max(recording.num_prompt_tokens - first, 0),
            key=prompt_key(recording.token_ids[: recording.num_prompt_tokens]),
        )


def prompt_key(token_ids: Sequence[int]) -> str:
    """A short name for a prompt."""
    return hashlib.blake2b(np.asarray(token_ids, np.int32).tobytes(), digest_size=8).hexdigest()
