"""A growing draft: the likeliest nodes, no deeper, wider or less likely than asked, and never behind a stop token."""

from __future__ import annotations

import random

import pytest

from draft.growing import GrowingTree
from draft.tree import Draft

NO_STOPS: frozenset[int] = frozenset()


def grown(tree: GrowingTree, rng: random.Random) -> tuple[Draft, int]:
    """The draft after random guesses of four children a node, and how many nodes were guessed behind."""
    nodes, count = [-1], 0
    while nodes:
        children = []
        for node in nodes:
            chances = sorted((rng.random() for _ in range(4)), reverse=True)
            children.append((node, [rng.randrange(50) for _ in chances], [c / sum(chances) for c in chances]))
        tree.grow(children)
        nodes = tree.next_nodes()
        count += len(nodes)
    return tree.draft("test"), count


@pytest.mark.parametrize("limit", [1, 5, 16])
@pytest.mark.parametrize("width", [1, 2, 8])
def test_a_draft_keeps_to_its_bounds(limit: int, width: int) -> None:
    """At most `limit` nodes, `depth` deep, `limit` of them guessed behind; chances fall along every path."""
    for seed in range(20):
        tree = GrowingTree(limit=limit, depth=4, width=width, min_chance=0.0, stops=NO_STOPS)
        draft, count = grown(tree, random.Random(seed))
        assert 1 <= len(draft) <= limit
        assert max(draft.depths) <= 4
        assert count <= limit
        assert draft.confidences is not None
        for node, parent in enumerate(draft.parents):
            assert parent < node
            assert draft.confidences[node] <= (draft.confidences[parent] if parent >= 0 else 1.0)


def test_it_has_the_likeliest_of_all_paths() -> None:
    """Of two levels with known chances the five likeliest nodes are kept."""
    tree = GrowingTree(limit=5, depth=2, width=2, min_chance=0.0, stops=NO_STOPS)
    tree.grow([(-1, [10, 11], [0.6, 0.3])])
    assert tree.next_nodes() == [0, 1]
    tree.grow([(0, [20, 21], [0.8, 0.1]), (1, [22, 23], [0.5, 0.4])])
    assert tree.next_nodes() == []
    draft = tree.draft("test")
    assert draft.token_ids == (10, 11, 20, 22, 23)
    assert draft.parents == (-1, -1, 0, 1, 1)
    assert draft.confidences == pytest.approx((0.6, 0.3, 0.48, 0.15, 0.12))
    assert tree.path(3) == (10, 21)


def test_unlikely_paths_and_stop_tokens_end() -> None:
    """Nothing is kept below the least chance but the first guess, and nothing is guessed behind a stop token."""
    tree = GrowingTree(limit=8, depth=4, width=4, min_chance=0.2, stops=frozenset({10}))
    tree.grow([(-1, [10, 11, 12], [0.5, 0.3, 0.1])])
    assert tree.next_nodes() == [1]
    tree.grow([(1, [13, 14], [0.9, 0.05])])
    assert tree.draft("test").token_ids == (10, 11, 13)
    hopeless = GrowingTree(limit=8, depth=4, width=4, min_chance=0.9, stops=NO_STOPS)
    hopeless.grow([(-1, [10, 11], [0.5, 0.3])])
    assert hopeless.next_nodes() == []
    assert hopeless.draft("test").token_ids == (10,)


def test_a_level_that_is_unlikely_as_a_whole_gets_no_other_behind_it() -> None:
    """Two nodes that together reach the least chance are guessed behind; one below it is not, but is drafted."""

    def tree() -> GrowingTree:
        return GrowingTree(limit=8, depth=4, width=4, min_chance=0.1, stops=NO_STOPS, min_reach=0.6)

    likely = tree()
    likely.grow([(-1, [10, 11], [0.4, 0.3])])
    assert likely.next_nodes() == [0, 1]
    unlikely = tree()
    unlikely.grow([(-1, [10], [0.55])])
    assert unlikely.next_nodes() == []
    assert unlikely.draft("test").token_ids == (10,)


def test_levels_stand_each_behind_the_likeliest_guess_of_the_one_before() -> None:
    """A chain with siblings; where the likeliest guess is not kept, what comes behind it is not either."""
    tree = GrowingTree(limit=8, depth=4, width=2, min_chance=0.1, stops=NO_STOPS)
    tree.grow_along([([10, 11], [0.6, 0.3]), ([20, 21], [0.5, 0.4]), ([30, 31], [0.2, 0.1]), ([40], [1.0])])
    draft = tree.draft("test")
    assert draft.token_ids == (10, 11, 20, 21)
    assert draft.parents == (-1, -1, 0, 0)
    assert draft.confidences == pytest.approx((0.6, 0.3, 0.3, 0.24))
