"""Features that a head has been told of and has not worked into its own cache yet."""

from __future__ import annotations

from collections.abc import Callable

import torch

from draft.proposer import Features

FUSE_AT = 512
"""So many rows are fused whether or not anybody asks, to a third of their size; fewer wait until somebody does."""
MAX_PIECES = 32
"""Steps whose rows are kept as they came; then they are joined, and the steps' memory is let go."""
SHARED_ROWS = 64
"""Steps of up to so many rows are kept alive by each of their sequences, which share them: not to copy is cheapest."""


class Backlog:
    """Rows of consecutive tokens [start, end) of one sequence: fused ones first, then the newest as they came."""

    def __init__(self, most: int) -> None:
        """Keeps the newest `most` rows, and for a while up to half as many more."""
        self._most = most
        self.start = 0
        self.end = 0
        self._fused: list[torch.Tensor] = []
        self._raw: list[tuple[torch.Tensor, int, int]] = []
        """Steps' rows, and which of them, as they came: a step without a draft only appends to them."""
        self._num_raw = 0

    def add(self, features: Features, fuse: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        """Keep what is new of `features`; False if there is a gap before them, and all that was here had to go.

        A preemption makes the target compute again what is here already. Behind a prefix hit, features begin late.
        """
        first, last = features.start, features.start + features.num_tokens
        is_joined = first <= self.end
        if not is_joined or last - self.end > self._most:
            self.start = self.end = max(first, last - self._most, self.end)
            self._fused, self._raw, self._num_raw = [], [], 0
        if last > self.end:
            self._append(features, self.end - first)
            self.end = last
            self._forget()
        if self._num_raw >= FUSE_AT and (raw := self.raw()) is not None:
            self.set_fused(fuse(raw))
        return is_joined

    def _append(self, features: Features, num_known: int) -> None:
        first, count = features.first + num_known, features.num_tokens - num_known
        rows, end = features.rows, first + count
        if rows.size(0) > max(SHARED_ROWS, count):
            rows, first, end = rows[first:end].clone(), 0, count
        self._num_raw += count
        self._raw.append((rows, first, end))
        if len(self._raw) == MAX_PIECES:
            self.raw()

    def _forget(self) -> None:
        """Let go of the oldest rows where there are too many."""
        excess = self.end - self.start - self._most
        if 2 * excess <= self._most:
            return
        self.start += excess
        num_fused = sum(map(len, self._fused))
        if excess < num_fused:
            self._fused = [torch.cat(self._fused)[excess:].clone()]
            return
        self._fused = []
        raw = self.raw()
        assert raw is not None
        self._num_raw -= excess - num_fused
        self._raw = [(raw[excess - num_fused :].clone(), 0, self._num_raw)]

    def raw(self) -> torch.Tensor | None:
        """The rows that are not fused yet; to be answered by `set_fused`."""
        if not self._raw:
            return None
        pieces = [rows[first:end] for rows, first, end in self._raw]
        if len(pieces) > 1:
            pieces = [torch.cat(pieces)]
            self._raw = [(pieces[0], 0, self._num_raw)]
        return pieces[0]

    @property
    def fused_end(self) -> int:
        """Where the rows begin that are not fused yet."""
        return self.end - self._num_raw

    def set_fused(self, rows: torch.Tensor) -> None:
        """What became of `raw`."""
        self._fused.append(rows)
        self._raw, self._num_raw = [], 0

    def rows(self, first: int, last: int) -> torch.Tensor:
        """[last - first, E] of tokens [first, last), all of which must be here, and fused."""
        if len(self._fused) > 1:
            self._fused = [torch.cat(self._fused)]
        return self._fused[0][first - self.start : last - self.start]

    def drop_before(self, index: int) -> None:
        """Forget the rows of tokens before `index`."""
        if index > self.start and self._fused:
            rows = self._fused[0] if len(self._fused) == 1 else torch.cat(self._fused)
            kept = rows[index - self.start :]
            # A copy where there are many: a view keeps all rows alive.
            self._fused = [kept if rows.size(0) <= MAX_PIECES else kept.clone()]
            self.start = index
