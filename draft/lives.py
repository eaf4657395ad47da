"""What a proposer keeps of each sequence between `start` and `finish`, and the order in which its verbs may come."""

from __future__ import annotations

from typing import Generic, TypeVar

from draft.proposer import DraftContext

State = TypeVar("State")
Config = TypeVar("Config")


class Lives(Generic[State]):
    """One state a live sequence, and how many tokens it was told of. Verbs out of order raise `ValueError`."""

    def __init__(self) -> None:
        self._states: dict[int, State] = {}
        self._num_tokens: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._states)

    def start(self, seq_id: int, state: State, num_tokens: int) -> None:
        """A sequence begins with `num_tokens` tokens."""
        if seq_id in self._states:
            raise ValueError(f"sequence {seq_id} was started already")
        self._states[seq_id] = state
        self._num_tokens[seq_id] = num_tokens

    def asked(self, context: DraftContext, config_type: type[Config]) -> tuple[State, Config]:
        """The state and the config of a sequence that wants a draft."""
        state, num_tokens = self._of(context.seq_id), self._num_tokens[context.seq_id]
        if len(context.token_ids) != num_tokens:
            raise ValueError(
                f"sequence {context.seq_id} has {len(context.token_ids)} tokens, {num_tokens} of which were committed; "
                "commit comes before propose"
            )
        if not isinstance(context.config, config_type):
            raise ValueError(
                f"sequence {context.seq_id} asks with {context.config!r}; this proposer takes a {config_type.__name__}"
            )
        return state, context.config

    def commit(self, seq_id: int, num_tokens: int) -> State:
        """The state of a sequence that grows by `num_tokens` tokens."""
        state = self._of(seq_id)
        self._num_tokens[seq_id] += num_tokens
        return state

    def finish(self, seq_id: int) -> State:
        """The state of a sequence that ends here."""
        state = self._of(seq_id)
        del self._states[seq_id], self._num_tokens[seq_id]
        return state

    def _of(self, seq_id: int) -> State:
        if seq_id not in self._states:
            raise ValueError(f"sequence {seq_id} was never started, or has finished")
        return self._states[seq_id]
