"""What heads are trained on, on disk: token ids of the target's own texts, and its hidden states at each of them.

`tokens.i32` [N] has every recorded token, sequence after sequence; `features.f16` [N, columns] the hidden states at it,
the asked layers side by side; `index.jsonl` one line a sequence, written after its data, so that what a kill leaves
behind is cut off; `store.json` says which target and which layers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

LARGEST_HALF = 65504.0
"""float16 ends here; a target's few huge activations are clipped to it."""


@dataclass(frozen=True, slots=True)
class StoredSequence:
    """One recorded sequence: tokens [start, start + num_tokens) of the store."""

    start: int
    num_tokens: int
    num_prompt_tokens: int
    """So many of its tokens were given, the others generated."""
    key: str
    """Says which prompt this was, so that an interrupted recording knows what it has."""


@dataclass(frozen=True, slots=True)
class StoreFormat:
    """What a store holds; it can be continued only by a recording of the same."""

    target: str
    """Fingerprint of the target."""
    layers: tuple[int, ...]
    """As in `ForwardBatch.feature_layers`."""
    hidden_size: int

    @property
    def num_columns(self) -> int:
        return len(self.layers) * self.hidden_size


class FeatureStore:
    """Appends sequences, and reads them back as memory-mapped arrays. Uses 4 + 2 * columns bytes a token of disk."""

    def __init__(self, folder: Path, form: StoreFormat, *, max_bytes: int) -> None:
        """Open or begin the store in `folder`. Raises ValueError if what lies there is of another format."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.form = self._found(form)
        self._capacity = max_bytes // (4 + 2 * self.form.num_columns)
        self.sequences = self._read_index()
        self.num_tokens = self.sequences[-1].start + self.sequences[-1].num_tokens if self.sequences else 0
        self._cut(self._folder / "tokens.i32", 4 * self.num_tokens)
        self._cut(self._folder / "features.f16", 2 * self.form.num_columns * self.num_tokens)

    @property
    def is_full(self) -> bool:
        """Whether the allowed disk space is used up."""
        return self.num_tokens >= self._capacity

    def append(
        self, token_ids: Sequence[int], features: npt.NDArray[np.float32], *, num_prompt_tokens: int, key: str
    ) -> None:
        """Add a sequence. `features` [n or n - 1, columns]: the newest token has not been through the target.

        Dropped where the store is full.
        """
        num_tokens = len(token_ids)
        if self.num_tokens + num_tokens > self._capacity:
            self._capacity = self.num_tokens
            return
        states = np.zeros((num_tokens, self.form.num_columns), np.float16)
        states[: len(features)] = np.clip(features, -LARGEST_HALF, LARGEST_HALF)
        with (self._folder / "tokens.i32").open("ab") as file:
            file.write(np.asarray(token_ids, np.int32).tobytes())
        with (self._folder / "features.f16").open("ab") as file:
            file.write(states.tobytes())
        sequence = StoredSequence(self.num_tokens, num_tokens, num_prompt_tokens, key)
        with (self._folder / "index.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(sequence)) + "\n")
        self.sequences.append(sequence)
        self.num_tokens += num_tokens

    def tokens(self) -> npt.NDArray[np.int32]:
        """[N] as they are now; not for writing."""
        return np.memmap(self._folder / "tokens.i32", np.int32, "r", shape=(self.num_tokens,))

    def features(self) -> npt.NDArray[np.float16]:
        """[N, columns] as they are now; not for writing. Rows of a sequence's last token are zero."""
        shape = (self.num_tokens, self.form.num_columns)
        return np.memmap(self._folder / "features.f16", np.float16, "r", shape=shape)

    def _found(self, wanted: StoreFormat) -> StoreFormat:
        """What the folder holds, if it has everything that is wanted; it may hold more layers."""
        path = self._folder / "store.json"
        if not path.exists():
            path.write_text(json.dumps(asdict(wanted)) + "\n", encoding="utf-8")
        fields = json.loads(path.read_text(encoding="utf-8"))
        found = StoreFormat(fields["target"], tuple(fields["layers"]), fields["hidden_size"])
        same = (found.target, found.hidden_size) == (wanted.target, wanted.hidden_size)
        if not same or not set(wanted.layers) <= set(found.layers):
            raise ValueError(f"{self._folder} holds recordings of {found}, not of {wanted}; use another folder")
        return found

    def _read_index(self) -> list[StoredSequence]:
        """The lines of the index that are whole; a last one that is not is cut off."""
        path = self._folder / "index.jsonl"
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith(b"\n")]
        if len(whole) < len(lines):
            path.write_bytes(b"".join(whole))
        return [StoredSequence(**json.loads(line)) for line in whole]

    @staticmethod
    def _cut(path: Path, num_bytes: int) -> None:
        size = path.stat().st_size if path.exists() else 0
        if size < num_bytes:
            raise ValueError(f"{path} has {size} bytes, the index says {num_bytes}; remove the folder and record anew")
        with path.open("ab") as file:
            file.truncate(num_bytes)
