"""The corpus against a search through everything it should hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft.corpus import MAX_MATCH, Corpus, Occurrence

TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=24)
TEXTS = st.lists(st.tuples(st.sampled_from(["", "a", "b"]), TEXT), max_size=12)


def search(texts: list[tuple[str, list[int]]], newest: list[int], salt: str, capacity: int) -> list[Occurrence]:
    """Occurrences in the last `capacity` positions, latest first, found by looking everywhere."""
    written = [
        (-1 if end else token, owner) for owner, text in texts for token, end in [*((t, 0) for t in text), (0, 1)]
    ]
    live = written[-capacity:]
    for n in (4, 2, 1):
        found = []
        for position in range(len(live) - 1, 0, -1):
            length = 0
            while (
                length < min(len(newest), position, MAX_MATCH) and live[position - 1 - length][0] == newest[-1 - length]
            ):
                length += 1
            if live[position][0] >= 0 and live[position][1] == salt and length >= n:
                rest = [token for token, _ in live[position : position + 5]]
                found.append(Occurrence(length, tuple(rest[: rest.index(-1)] if -1 in rest else rest)))
        if found:
            return found
    return []


@given(texts=TEXTS, newest=TEXT, salt=st.sampled_from(["", "a", "c"]))
def test_corpus_finds_what_a_search_of_its_live_tokens_finds(
    texts: list[tuple[str, list[int]]], newest: list[int], salt: str
) -> None:
    """Match lengths, continuations and order are those of a plain search of the newest 64 positions of that salt."""
    corpus = Corpus(64, (4, 2, 1))
    for owner, text in texts:
        corpus.add(text, owner)
    assert corpus.occurrences(newest, 5, 64, salt) == search(texts, newest, salt, 64)
    assert corpus.check_integrity() is None


@given(chunks=st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=12), newest=TEXT)
def test_a_growing_text_is_searched_like_a_whole_one(chunks: list[list[int]], newest: list[int]) -> None:
    """However the open text is cut into pieces, matches are the same, and a copy that reaches its end repeats."""
    text = [token for chunk in chunks for token in chunk]
    grown, whole = Corpus(64, (4, 2, 1)), Corpus(64, (4, 2, 1))
    for chunk in chunks:
        grown.extend(chunk)
    whole.extend(text)
    found = grown.occurrences(newest, 5, 64)
    assert found == whole.occurrences(newest, 5, 64)
    closed = search([("", text)], newest, "", 99)
    assert found == [Occurrence(o.match_length, (o.continuation * 5)[:5]) for o in closed]


@given(texts=TEXTS)
def test_memory_is_bounded_and_the_oldest_goes_first(texts: list[tuple[str, list[int]]]) -> None:
    """The corpus never holds more than its capacity; the newest text is always there, salts without tokens are not."""
    corpus = Corpus(32, (2, 1))
    for owner, text in texts:
        corpus.add(text, owner)
        assert corpus.num_tokens <= 32
        if len(text) > 2:
            assert corpus.occurrences(text[:2], 30, 1, owner)
    num_live, salts = 32, set()
    for owner, text in reversed(texts):
        if num_live > 0:
            salts.add(owner)
        num_live -= len(text) + 1
    assert corpus.num_salts == len(salts)


def test_a_salt_never_sees_another_salts_text() -> None:
    """What one tenant added is found by that tenant alone, also where texts share their tokens."""
    corpus = Corpus(64, (2, 1))
    corpus.add([1, 2, 3, 4], "a")
    corpus.add([1, 2, 9, 9], "b")
    assert [o.continuation for o in corpus.occurrences([1, 2], 2, 8, "a")] == [(3, 4)]
    assert [o.continuation for o in corpus.occurrences([1, 2], 2, 8, "b")] == [(9, 9)]
    assert corpus.occurrences([1, 2], 2, 8, "") == []


def test_integrity_check_says_what_is_wrong() -> None:
    """A chain whose tokens were changed behind its back is reported with its place."""
    corpus = Corpus(16, (2, 1))
    corpus.add([1, 2, 3, 4])
    corpus._tokens[1] = 7
    reason = corpus.check_integrity()
    assert reason is not None
    assert "have another hash" in reason


def test_capacity_must_be_a_power_of_two() -> None:
    """Another capacity is refused with its value."""
    with pytest.raises(ValueError, match="corpus capacity is 100"):
        Corpus(100, (1,))
