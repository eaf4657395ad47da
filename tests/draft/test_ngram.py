"""Prompt lookup against a rescan of the whole sequence, and the order of its life-cycle verbs."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft.config import NgramConfig, NoSpeculation, SpeculationConfig
from draft.ngram import NgramIndex, NgramProposer, copy_from
from draft.proposer import DraftContext
from target.sampling_params import SamplingParams

CHUNKS = st.lists(st.lists(st.integers(0, 3), max_size=5), min_size=1, max_size=30)


def context(seq_id: int, token_ids: list[int], config: SpeculationConfig) -> DraftContext:
    """A sequence as the engine would show it."""
    return DraftContext(seq_id, token_ids, len(token_ids), SamplingParams(), config)


def rescan(token_ids: list[int], min_n: int, max_n: int) -> tuple[int, int]:
    """Longest match first, latest occurrence, by looking everywhere."""
    for n in range(min(max_n, len(token_ids) - 1), min_n - 1, -1):
        for end in range(len(token_ids) - 1, n - 1, -1):
            if token_ids[end - n : end] == token_ids[-n:]:
                return n, end
    return 0, 0


@given(chunks=CHUNKS, min_n=st.integers(1, 3), extra=st.integers(0, 3))
def test_incremental_index_finds_what_a_rescan_finds(chunks: list[list[int]], min_n: int, extra: int) -> None:
    """However a sequence grows, the index gives the longest match and its latest occurrence."""
    index, token_ids = NgramIndex(), list[int]()
    for chunk in chunks:
        token_ids += chunk
        assert index.longest_match(token_ids, min_n, min_n + extra) == rescan(token_ids, min_n, min_n + extra)


@given(chunks=CHUNKS, ranges=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=5))
def test_one_index_serves_every_range_of_n(chunks: list[list[int]], ranges: list[tuple[int, int]]) -> None:
    """An n that was not asked for a while is caught up when it is asked again."""
    index, token_ids = NgramIndex(), list[int]()
    for i, chunk in enumerate(chunks):
        token_ids += chunk
        min_n, extra = ranges[i % len(ranges)]
        assert index.longest_match(token_ids, min_n, min_n + extra) == rescan(token_ids, min_n, min_n + extra)


@given(token_ids=st.lists(st.integers(0, 9), min_size=1, max_size=9), data=st.data(), num_tokens=st.integers(1, 32))
def test_copy_continues_with_itself(token_ids: list[int], data: st.DataObject, num_tokens: int) -> None:
    """A copy that reaches the sequence's end reads the tokens it has just written."""
    position = data.draw(st.integers(0, len(token_ids) - 1))
    grown = list(token_ids)
    for i in range(num_tokens):
        grown.append(grown[position + i])
    assert copy_from(token_ids, position, num_tokens) == tuple(grown[len(token_ids) :])


@given(chunks=CHUNKS)
def test_index_memory_is_bounded_by_tokens_times_orders(chunks: list[list[int]]) -> None:
    """The index holds at most one entry for each token and n."""
    index, token_ids = NgramIndex(), list[int]()
    for chunk in chunks:
        token_ids += chunk
        index.longest_match(token_ids, 1, 4)
    assert index.num_entries <= 4 * len(token_ids)


def test_draft_follows_the_latest_occurrence_of_the_longest_match() -> None:
    """Of two occurrences the later is continued, and the draft says how long the match was."""
    proposer = NgramProposer()
    tokens = [1, 2, 7, 7, 1, 2, 8, 9, 1, 2]
    proposer.start(0, tokens)
    (draft,) = proposer.propose([context(0, tokens, NgramConfig(max_n=3))], [3])
    assert draft.token_ids == (8, 9, 1)
    assert draft.is_chain
    assert (draft.source, draft.match_length, draft.skipped) == ("ngram", 2, None)


def test_a_match_shorter_than_min_n_is_no_match() -> None:
    """Below min_n the proposer says no_match instead of guessing."""
    proposer = NgramProposer()
    proposer.start(0, [5, 6, 5])
    drafts = [proposer.propose([context(0, [5, 6, 5], NgramConfig(min_n=n, max_n=3))], [4])[0] for n in (1, 2)]
    assert [(draft.token_ids, draft.skipped) for draft in drafts] == [((6, 5, 6, 5), None), ((), "no_match")]


def test_sequences_do_not_see_one_another() -> None:
    """A batch gives one draft a context, in order, each from its own text."""
    proposer = NgramProposer()
    proposer.start(0, [1, 2, 1])
    proposer.start(1, [1, 3, 1])
    config = NgramConfig()
    drafts = proposer.propose([context(1, [1, 3, 1], config), context(0, [1, 2, 1], config)], [1, 2])
    assert [draft.token_ids for draft in drafts] == [(3,), (2, 1)]


def test_verbs_out_of_order_raise() -> None:
    """Each verb on a sequence that is not alive, a second start, and a propose before its commit are refused."""
    proposer = NgramProposer()
    with pytest.raises(ValueError, match="sequence 4 was never started"):
        proposer.propose([context(4, [1], NgramConfig())], [1])
    with pytest.raises(ValueError, match="sequence 4"):
        proposer.commit(4, [1], None)
    with pytest.raises(ValueError, match="sequence 4"):
        proposer.finish(4)
    proposer.start(4, [1, 1])
    with pytest.raises(ValueError, match="started already"):
        proposer.start(4, [1])
    with pytest.raises(ValueError, match="commit comes before propose"):
        proposer.propose([context(4, [1, 1, 1], NgramConfig())], [1])
    with pytest.raises(ValueError, match="NgramConfig"):
        proposer.propose([context(4, [1, 1], NoSpeculation())], [1])
    proposer.commit(4, [1], None)
    assert proposer.propose([context(4, [1, 1, 1], NgramConfig())], [1])[0].token_ids == (1,)
    proposer.finish(4)
    with pytest.raises(ValueError, match="has finished"):
        proposer.commit(4, [1], None)


def test_min_n_above_max_n_is_refused() -> None:
    """A range of n that holds nothing is an error that names both ends."""
    with pytest.raises(msgspec.ValidationError, match="min_n is 4, above max_n, 3"):
        msgspec.convert({"method": "ngram", "min_n": 4, "max_n": 3}, NgramConfig)
