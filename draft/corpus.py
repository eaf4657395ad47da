"""A bounded corpus of token texts in which the newest tokens of a sequence are found again, with what followed them."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

MAX_MATCH = 16
"""Longest match that is told apart: beyond it every occurrence is as good."""
MAX_WALK = 64
"""Steps along one hash chain after which the search gives up, so that no text can make it slow."""
SEPARATOR = -1


FEW = 8
"""So many n-grams are hashed one by one; for more, slices pay."""


class Occurrence(NamedTuple):
    """One earlier sight of the newest tokens."""

    match_length: int
    continuation: tuple[int, ...]
    """What followed: as much as was asked for, or to the end of its text."""


class Corpus:
    """The last `capacity` tokens of all texts added, in a ring; the oldest are overwritten.

    Texts are searched by hash chains, as in LZ77 compressors: for each n of `orders` a table from an n-gram's hash to
    the position behind its latest occurrence, and for each position the one before it with the same hash. Adding a
    token costs one entry for each n, forgetting one costs nothing: a chain ends where it leaves the ring. Every hit
    is compared token by token, and found by the salt it was added with alone.

        positions    ... | t t t t -1 | t t t -1 | t t t            -1 ends a text
        live             oldest ───────────────▶ num_written        position p stands in slot p % capacity
    """

    def __init__(self, capacity: int, orders: Sequence[int]) -> None:
        if capacity < 2 or capacity & (capacity - 1):
            raise ValueError(f"corpus capacity is {capacity} tokens; it must be a power of two above 1")
        self.capacity = capacity
        self.orders = tuple(sorted(orders, reverse=True))
        """A match of any length is found through the longest of these it contains."""
        self._mask = capacity - 1
        self._table_mask = 2 * capacity - 1
        self._tokens = array("i", [SEPARATOR]) * capacity
        self._owners = array("q", [0]) * capacity
        self._heads = {n: array("q", [-1]) * (2 * capacity) for n in self.orders}
        self._previous = {n: array("q", [-1]) * capacity for n in self.orders}
        self._num_written = 0
        self._text_start = 0
        self._owner_ids: dict[str, int] = {}
        self._texts: deque[tuple[int, str]] = deque()
        """Where each live text ends, and its salt."""
        self._num_texts: Counter[str] = Counter()

    @property
    def num_tokens(self) -> int:
        """Tokens held, ends of texts included."""
        return min(self._num_written, self.capacity)

    @property
    def num_salts(self) -> int:
        """Salts that own live tokens."""
        return len(self._owner_ids)

    def add(self, token_ids: Sequence[int], salt: str = "") -> None:
        """Add one whole text. Only searches with the same salt find it."""
        self.extend(token_ids, salt)
        self._write([SEPARATOR], 0)
        self._text_start = self._num_written
        self._texts.append((self._num_written, salt))
        self._num_texts[salt] += 1
        self._forget_dead_texts()

    def extend(self, token_ids: Sequence[int], salt: str = "") -> None:
        """Add tokens to the text that is open, which `add` ends. All of one text have the same salt."""
        owner = self._owner_ids.setdefault(salt, self._num_written + 1)
        window = self._tail(self.orders[0]) + list(token_ids)
        first = self._num_written
        self._write(token_ids, owner)
        for n in self.orders:
            self._index(n, window, first, owner)

    def _write(self, token_ids: Sequence[int], owner: int) -> None:
        while token_ids:
            slot = self._num_written & self._mask
            fitting = array("i", token_ids[: self.capacity - slot])
            self._tokens[slot : slot + len(fitting)] = fitting
            self._owners[slot : slot + len(fitting)] = array("q", [owner]) * len(fitting)
            self._num_written += len(fitting)
            token_ids = token_ids[len(fitting) :]

    def _tail(self, num_tokens: int) -> list[int]:
        """The last tokens of the open text, at most `num_tokens`."""
        start = max(self._text_start, self._num_written - min(num_tokens, self.capacity))
        return [self._tokens[position & self._mask] for position in range(start, self._num_written)]

    def _index(self, n: int, window: list[int], first: int, owner: int) -> None:
        """Enter the n-grams in front of the positions from `first` on; `window` ends where the text does now."""
        heads, previous, mask, table_mask = self._heads[n], self._previous[n], self._mask, self._table_mask
        window_start = self._num_written - len(window)
        position = max(first, window_start + n)
        grams = window[position - n - window_start : -1]
        for key in _hashes(grams, n, owner):
            bucket = key & table_mask
            previous[position & mask] = heads[bucket]
            heads[bucket] = position
            position += 1

    def occurrences(self, newest: Sequence[int], num_tokens: int, most: int, salt: str = "") -> list[Occurrence]:
        """Up to `most` latest occurrences of the longest indexed n-gram at the end of `newest`, latest first.

        Each with its match length, up to `MAX_MATCH`, and up to `num_tokens` tokens of what followed.
        """
        owner = self._owner_ids.get(salt)
        newest = newest[-MAX_MATCH:]
        if owner is None:
            return []
        for n in self.orders:
            if len(newest) < n:
                continue
            found = []
            for position, match_length in self._matches(newest, n, owner):
                found.append(Occurrence(match_length, self._continuation(position, num_tokens)))
                if len(found) == most:
                    break
            if found:
                return found
        return []

    def _matches(self, newest: Sequence[int], n: int, owner: int) -> Iterator[tuple[int, int]]:
        """Positions behind occurrences of the last n tokens of `newest`, latest first, with how far back they match."""
        tokens, owners, previous, mask = self._tokens, self._owners, self._previous[n], self._mask
        position = self._heads[n][hash((owner, *newest[-n:])) & self._table_mask]
        oldest = max(self._num_written - self.capacity, 0)
        for _ in range(MAX_WALK):
            if position < oldest:
                return
            most = min(len(newest), position - oldest)
            length = 0
            while length < most and tokens[(position - 1 - length) & mask] == newest[-1 - length]:
                length += 1
            if length >= n and owners[position & mask] == owner:
                yield position, length
            position = previous[position & mask]

    def _continuation(self, position: int, num_tokens: int) -> tuple[int, ...]:
        """The tokens from `position` to the end of its text; in the open text a copy goes on with itself."""
        slot = position & self._mask
        length = min(num_tokens, self._num_written - position)
        run = self._tokens[slot : slot + length]
        run += self._tokens[: length - len(run)]
        if position < self._text_start:
            return tuple(run[: run.index(SEPARATOR)]) if SEPARATOR in run else tuple(run)
        num_repeats = -(-num_tokens // length)
        return (tuple(run) * num_repeats)[:num_tokens]

    def _forget_dead_texts(self) -> None:
        """Forget the salts whose last text has been overwritten."""
        while self._texts[0][0] <= self._num_written - self.capacity:
            _, salt = self._texts.popleft()
            self._num_texts[salt] -= 1
            if not self._num_texts[salt]:
                del self._owner_ids[salt], self._num_texts[salt]

    def check_integrity(self) -> str | None:
        """The first inconsistency found, or None. Walks everything: seconds for a full corpus of a million tokens."""
        oldest = max(self._num_written - self.capacity, 0)
        for n in self.orders:
            num_linked = 0
            for bucket, head in enumerate(self._heads[n]):
                position, newer = head, self._num_written
                while position >= oldest:
                    if position >= newer:
                        return f"order {n}, bucket {bucket}: position {position} stands behind {newer} in its chain"
                    if position - n >= oldest and self._bucket_before(position, n) != bucket:
                        return f"order {n}, bucket {bucket}: the tokens before {position} have another hash"
                    num_linked += 1
                    position, newer = self._previous[n][position & self._mask], position
            num_expected = sum(self._is_indexed(position, n) for position in range(oldest + n, self._num_written))
            if not num_expected <= num_linked <= num_expected + n:
                return f"order {n}: {num_linked} positions are linked, {num_expected} should be"
        if sum(self._num_texts.values()) != len(self._texts):
            return f"{len(self._texts)} texts are live, {sum(self._num_texts.values())} are counted"
        return None

    def _bucket_before(self, position: int, n: int) -> int:
        gram = [self._tokens[p & self._mask] for p in range(position - n, position)]
        return hash((self._owners[(position - 1) & self._mask], *gram)) & self._table_mask

    def _is_indexed(self, position: int, n: int) -> bool:
        """Whether the n tokens before `position`, and the one there, are of one text."""
        return SEPARATOR not in [self._tokens[p & self._mask] for p in range(position - n, position + 1)]


def _hashes(tokens: Sequence[int], n: int, owner: int) -> Iterable[int]:
    """Of each n-gram in turn, with its owner."""
    count = len(tokens) - n + 1
    if count <= FEW:
        return [hash((owner, *tokens[i : i + n])) for i in range(count)]
    return map(hash, zip(repeat(owner), *(tokens[i:] for i in range(n)), strict=False))
