"""Token ids to text, as it grows: never half a character, and nothing that a stop string may yet take away."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import msgspec


class TextDelta(msgspec.Struct, frozen=True):
    """What can be shown of a sequence, beyond what was shown before."""

    text: str
    offsets: tuple[int, ...]
    """One entry a token that can be shown: the offset in the whole text at which it begins."""


class TextStream:
    """The text of one sequence. What it gives does not depend on how many tokens arrive at a time.

    Characters are shown when they are complete. Where a stop string has begun and not ended, its characters are held
    back. The text ends before the stop string that is complete first (of two that end together, the longer); a token
    counts if any of its characters is before that end. Stop strings are looked for behind the first `min_tokens`
    tokens only. With `shows_stop` the text ends behind the stop string, and is held back all the same.

        text        T h e   E N D          stop "END"
        tokens      [The][ E][ND]          [The] and [ E] count: the second brought the space
        shown       T h e ␣                "E" and "ND" were held back, then cut
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        strip_leading_space: bool = False,
        shows_stop: bool = False,
    ) -> None:
        self.stop_string: str | None = None
        """The stop string that ended the text, if one did."""
        self.num_tokens = 0
        """Tokens shown so far."""
        self._token_bytes = token_bytes
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._strips = strip_leading_space
        self._shows_stop = shows_stop
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_fed = 0
        self._length = 0
        self._num_shown = 0
        self._held = ""
        self._starts: deque[int] = deque()

    @property
    def is_stopped(self) -> bool:
        return self.stop_string is not None

    def feed(self, token_ids: Iterable[int]) -> TextDelta:
        """What can be shown after further tokens; tokens behind a stop string are ignored."""
        shown = []
        for token_id in token_ids:
            if self.is_stopped:
                break
            self._num_fed += 1
            self._starts.append(self._length)
            shown.append(self._grow(self._decoder.decode(self._token_bytes(token_id))))
        return self._delta("".join(shown), is_last=False)

    def finish(self) -> TextDelta:
        """The rest, when no token follows: text that was held back, and a replacement for half a character."""
        text = "" if self.is_stopped else self._grow(self._decoder.decode(b"", final=True))
        if not self.is_stopped:
            text += self._held
            self._num_shown += len(self._held)
            self._held = ""
        return self._delta(text, is_last=True)

    def _grow(self, text: str) -> str:
        """Append a token's text; return what can be shown."""
        if self._strips and text and not self._length:
            text = text.removeprefix(" ")
            self._strips = False
        self._length += len(text)
        if self._stop and self._num_fed > self._min_tokens:
            self._held += text
            text = self._release()
        self._num_shown += len(text)
        return text

    def _release(self) -> str:
        """Take from the held text what no stop string can reach any more."""
        ends = [(start + len(stop), start, stop) for stop in self._stop if (start := self._held.find(stop)) >= 0]
        if ends:
            end, start, self.stop_string = min(ends)
            cut = end if self._shows_stop else start
        else:
            cut = _start_of_partial(self._held, self._stop)
        text, self._held = self._held[:cut], "" if ends else self._held[cut:]
        return text

    def _delta(self, text: str, *, is_last: bool) -> TextDelta:
        starts = self._starts
        offsets = []
        while starts and (starts[0] < self._num_shown or (is_last and not self.is_stopped)):
            offsets.append(starts.popleft())
        self.num_tokens += len(offsets)
        return TextDelta(text, tuple(offsets))


def _start_of_partial(text: str, stop: Sequence[str]) -> int:
    """Where the longest end of `text` begins that one of the stop strings begins with; its length if none does."""
    longest = max(map(len, stop)) - 1
    for start in range(max(len(text) - longest, 0), len(text)):
        tail = text[start:]
        if any(word.startswith(tail) for word in stop):
            return start
    return len(text)
