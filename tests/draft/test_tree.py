"""The draft tree: chains, trimming, reasons."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft.tree import SKIP_REASONS, Draft


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    size = draw(st.integers(0, 20))
    parents = tuple(draw(st.integers(-1, i - 1)) for i in range(size))
    return Draft(tuple(range(100, 100 + size)), parents, "suffix", tuple(1 / (i + 2) for i in range(size)), 3)


def path_to(draft: Draft, node: int) -> tuple[int, ...]:
    """Tokens from the root to a node."""
    return () if node < 0 else (*path_to(draft, draft.parents[node]), draft.token_ids[node])


@given(draft=drafts(), num_nodes=st.integers(-1, 25), max_depth=st.one_of(st.none(), st.integers(0, 6)))
def test_a_trimmed_tree_keeps_paths_and_signals(draft: Draft, num_nodes: int, max_depth: int | None) -> None:
    """What is left is the first nodes not too deep, each with its own path, confidence, source and match length."""
    trimmed = draft.trim(num_nodes, max_depth)
    paths = [path_to(draft, i) for i in range(len(draft)) if max_depth is None or draft.depths[i] <= max_depth]
    assert [path_to(trimmed, i) for i in range(len(trimmed))] == paths[: max(num_nodes, 0)]
    assert (trimmed.source, trimmed.match_length) == ("suffix", 3)
    assert trimmed.confidences is not None
    kept = dict(zip(draft.token_ids, draft.confidences or (), strict=True))
    assert list(trimmed.confidences) == [kept[token_id] for token_id in trimmed.token_ids]


@given(draft=drafts(), data=st.data())
def test_any_nodes_closed_under_parents_are_a_tree(draft: Draft, data: st.DataObject) -> None:
    """Keeping nodes whose parents are kept changes no path."""
    nodes: list[int] = []
    for node, parent in enumerate(draft.parents):
        if (parent < 0 or parent in nodes) and data.draw(st.booleans()):
            nodes.append(node)
    kept = draft.keep(nodes)
    assert [path_to(kept, i) for i in range(len(kept))] == [path_to(draft, node) for node in nodes]


@given(draft=drafts())
def test_depths_and_chains(draft: Draft) -> None:
    """A node's depth is the length of its path, and a chain is a tree whose every node follows the one before."""
    assert list(draft.depths) == [len(path_to(draft, i)) for i in range(len(draft))]
    assert draft.is_chain == (list(draft.depths) == list(range(1, len(draft) + 1)))


def test_a_chain_is_a_draft_without_branches() -> None:
    """Its parents are -1, 0, 1, …"""
    draft = Draft.chain((7, 8, 9), "ngram", match_length=2)
    assert (draft.parents, draft.is_chain, len(draft), draft.skipped) == ((-1, 0, 1), True, 3, None)


def test_an_empty_draft_has_one_of_the_reasons() -> None:
    """A reason nobody counts is refused, and names those there are."""
    for reason in SKIP_REASONS:
        assert Draft.none(reason, "ngram") == Draft(source="ngram", skipped=reason)
    with pytest.raises(ValueError, match="unknown skip reason 'lazy'; one of"):
        Draft.none("lazy")
