"""Suffix decoding: trees by frequency, drafts as long as their match, a corpus apart for each salt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft.config import NgramConfig, SpeculationConfig, SuffixConfig
from draft.corpus import Occurrence
from draft.proposer import DraftContext
from draft.suffix import SuffixProposer, VotedTree
from draft.tree import Draft
from target.sampling_params import SamplingParams

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def propose(proposer: SuffixProposer, seq_id: int, tokens: list[int], config: SpeculationConfig, limit: int) -> Draft:
    """One sequence's draft."""
    (draft,) = proposer.propose([DraftContext(seq_id, tokens, 1, SamplingParams(), config)], [limit])
    return draft


def respond(proposer: SuffixProposer, tokens: list[int], salt: str = "") -> None:
    """A sequence that comes, answers with `tokens` and goes."""
    proposer.start(99, [0], cache_salt=salt)
    proposer.commit(99, tokens, None)
    proposer.finish(99)


@given(
    history=st.lists(TOKENS, max_size=4),
    tokens=TOKENS,
    limit=st.integers(1, 63),
    factor=st.sampled_from([0.5, 1.0, 3.0]),
    size=st.integers(1, 63),
)
def test_drafts_are_bounded_topological_trees_of_what_was_seen(
    history: list[list[int]], tokens: list[int], limit: int, factor: float, size: int
) -> None:
    """Parents come first, siblings differ, confidences fall along a path, and every path was read somewhere."""
    proposer = SuffixProposer(256)
    for response in history:
        respond(proposer, response)
    proposer.start(0, tokens)
    config = SuffixConfig(tree_size=size, length_factor=factor, min_confidence=0.05)
    draft = propose(proposer, 0, tokens, config, limit)
    assert len(draft) <= min(limit, size)
    assert (draft.skipped is None) == (len(draft) > 0)
    assert draft.confidences is None or len(draft.confidences) == len(draft)
    paths: list[tuple[int, ...]] = []
    for i, parent in enumerate(draft.parents):
        assert -1 <= parent < i
        paths.append((paths[parent] if parent >= 0 else ()) + (draft.token_ids[i],))
        assert draft.confidences is not None
        assert 0.05 <= draft.confidences[i] < (draft.confidences[parent] if parent >= 0 else 1.0)
    assert len(set(paths)) == len(paths)
    assert max(draft.depths, default=0) <= max(1, round(factor * draft.match_length + 0.5))
    readable = [tokens[p:] * 64 for p in range(1, len(tokens))] + [h[p:] for h in history for p in range(1, len(h))]
    assert all(any(tuple(text[: len(path)]) == path for text in readable) for path in paths)


@given(tokens=TOKENS, pieces=st.lists(TOKENS, max_size=6))
def test_a_sequence_that_grew_drafts_like_one_that_started_whole(tokens: list[int], pieces: list[list[int]]) -> None:
    """The incremental index gives the same draft as one built at once, through every doubling."""
    grown, config = SuffixProposer(2), SuffixConfig()
    grown.start(0, tokens)
    text = list(tokens)
    for piece in pieces:
        propose(grown, 0, text, config, 8)
        text += piece
        grown.commit(0, piece, None)
    whole = SuffixProposer(2)
    whole.start(0, text)
    assert propose(grown, 0, text, config, 8) == propose(whole, 0, text, config, 8)


def test_an_index_that_doubles_forgets_nothing() -> None:
    """A sequence longer than its first index still matches its beginning."""
    proposer = SuffixProposer(2)
    text = list(range(200))
    proposer.start(0, text)
    propose(proposer, 0, text, SuffixConfig(), 8)
    more = [*range(200, 700), 5, 6, 7]
    proposer.commit(0, more, None)
    draft = propose(proposer, 0, text + more, SuffixConfig(length_factor=1.0), 8)
    assert (draft.token_ids, draft.match_length) == ((8, 9, 10), 3)


def test_longer_matches_give_longer_drafts() -> None:
    """The depth is the match length times the factor, up to the limit."""
    proposer = SuffixProposer(2**12)
    config = SuffixConfig(length_factor=1.0, min_confidence=0.0)
    for length in (2, 4, 6):
        tokens = [*range(10, 30), 1, *range(10, 10 + length)]
        proposer.start(length, tokens)
        assert propose(proposer, length, tokens, config, 32).token_ids == tuple(range(10 + length, 10 + 2 * length))
    assert len(propose(proposer, 6, tokens, config, 5)) == 5


def test_the_more_frequent_continuation_comes_first_and_both_are_in_the_tree() -> None:
    """Of two continuations the one seen more often has the higher confidence; a chain has that one alone."""
    proposer = SuffixProposer(2**12)
    for response in ([1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 5]):
        respond(proposer, response)
    proposer.start(0, [9, 1, 2, 3])
    tree = propose(proposer, 0, [9, 1, 2, 3], SuffixConfig(), 8)
    assert (tree.token_ids, tree.parents) == ((4, 5), (-1, -1))
    assert tree.confidences == pytest.approx((6 / 10, 3 / 10))
    chain = propose(proposer, 0, [9, 1, 2, 3], SuffixConfig(num_speculative_tokens=4), 8)
    assert (chain.token_ids, chain.is_chain, chain.match_length) == ((4,), True, 3)


def test_votes_grow_with_match_and_depth() -> None:
    """A match of m tokens has m + depth votes against one for the unseen."""
    tree = VotedTree(8, 0.0, is_chain=False)
    tree.grow([Occurrence(2, (1, 1, 1)), Occurrence(1, (1, 2, 2))], 2)
    assert tree.token_ids == [1, 1, 2]
    assert tree.parents == [-1, 0, 0]
    assert tree.confidences == pytest.approx([3 / 4, 3 / 4 * 3 / 6, 3 / 4 * 2 / 6])


def test_salts_are_apart() -> None:
    """A tenant's finished response is drafted for that tenant and for nobody else."""
    proposer = SuffixProposer(2**12)
    respond(proposer, [1, 2, 3, 4], "a")
    for seq_id, salt in enumerate(("a", "b", "")):
        proposer.start(seq_id, [8, 1, 2], cache_salt=salt)
    drafts = [propose(proposer, seq_id, [8, 1, 2], SuffixConfig(), 2) for seq_id in range(3)]
    assert [(draft.token_ids, draft.skipped) for draft in drafts] == [
        ((3, 4), None),
        ((), "no_match"),
        ((), "no_match"),
    ]


def test_the_oldest_responses_are_evicted() -> None:
    """Beyond its capacity the corpus forgets the oldest response first."""
    proposer = SuffixProposer(16)
    for i in range(6):
        respond(proposer, [10 * i + j for j in range(5)])
    assert proposer.corpus.num_tokens == 16
    proposer.start(0, [0])
    assert propose(proposer, 0, [0], SuffixConfig(), 2).skipped == "no_match"
    for i, is_there in ((0, False), (2, False), (4, True), (5, True)):
        proposer.commit(0, [10 * i, 10 * i + 1], None)
        text = proposer._lives.commit(0, 0).output_token_ids
        assert (propose(proposer, 0, [0, *text], SuffixConfig(), 2).skipped is None) == is_there
    assert proposer.check_integrity() is None


def test_prompts_are_not_shared() -> None:
    """Responses go to the shared corpus; a prompt stays with its sequence."""
    proposer = SuffixProposer(2**12)
    proposer.start(0, [1, 2, 3, 4])
    proposer.finish(0)
    assert proposer.corpus.num_tokens == 0


def test_verbs_out_of_order_raise() -> None:
    """Each verb on a sequence that is not alive, a second start, and a propose before its commit are refused."""
    proposer = SuffixProposer(2**12)
    with pytest.raises(ValueError, match="sequence 4 was never started"):
        proposer.commit(4, [1], None)
    with pytest.raises(ValueError, match="sequence 4 was never started"):
        proposer.finish(4)
    with pytest.raises(ValueError, match="sequence 4 was never started"):
        propose(proposer, 4, [1], SuffixConfig(), 1)
    proposer.start(4, [1, 1])
    with pytest.raises(ValueError, match="started already"):
        proposer.start(4, [1])
    with pytest.raises(ValueError, match="commit comes before propose"):
        propose(proposer, 4, [1, 1, 1], SuffixConfig(), 1)
    with pytest.raises(ValueError, match="SuffixConfig"):
        propose(proposer, 4, [1, 1], NgramConfig(), 1)
    proposer.finish(4)
    with pytest.raises(ValueError, match="has finished"):
        proposer.finish(4)
