"""The backlog: features as they come, until somebody asks for a draft."""

from __future__ import annotations

import random

import pytest
import torch

from draft.backlog import Backlog
from draft.proposer import Features

WIDTH = 6


def halved(rows: torch.Tensor) -> torch.Tensor:
    """Stands for fusing."""
    return rows[:, : WIDTH // 2]


@pytest.mark.parametrize("num_others", [0, 1, 63])
@pytest.mark.parametrize("seed", range(3))
def test_rows_come_back_as_they_were(seed: int, num_others: int) -> None:
    """In pieces of any size, some twice, beside rows of other sequences: what was added is there, in order."""
    rng = random.Random(seed)
    whole = torch.randn(400, WIDTH)
    backlog = Backlog(1000)
    end = 0
    while end < len(whole):
        start = max(end - rng.choice((0, 0, 2)), 0)
        end = min(start + rng.choice((3, 4, 5)), len(whole))
        step = torch.cat((whole[start:end], torch.zeros(num_others, WIDTH)))
        assert backlog.add(Features(start, step, 0, end - start), halved)
        if rng.random() < 0.02 and (raw := backlog.raw()) is not None:
            backlog.set_fused(halved(raw))
    if (raw := backlog.raw()) is not None:
        backlog.set_fused(halved(raw))
    assert torch.equal(backlog.rows(0, len(whole)), halved(whole))


@pytest.mark.parametrize(("num_others", "num_spare"), [(0, 0), (63, 32 * 64), (64, 200), (1000, 200)])
def test_other_rows_of_a_step_are_not_kept_alive_for_long(num_others: int, num_spare: int) -> None:
    """What 200 steps leave behind is little more than the sequence's own, and the newest steps where they are small."""
    backlog = Backlog(1000)
    for index in range(200):
        step = torch.randn(1 + num_others, WIDTH)
        backlog.add(Features(index, step, 0, 1), halved)
    storages = {piece.untyped_storage().data_ptr(): piece.untyped_storage().nbytes() for piece, _, _ in backlog._raw}
    assert sum(storages.values()) <= (200 + num_spare) * WIDTH * 4


def test_the_newest_rows_stay_where_there_are_too_many() -> None:
    """A backlog of at most 50 rows forgets the oldest, fused and raw, and says where it begins."""
    whole = torch.randn(300, WIDTH)
    backlog = Backlog(50)
    for index in range(300):
        backlog.add(Features(index, whole[index : index + 1].clone()), halved)
        if index in {10, 120} and (raw := backlog.raw()) is not None:
            backlog.set_fused(halved(raw))
        assert index < backlog.end <= backlog.start + 75
    raw = backlog.raw()
    assert raw is not None
    backlog.set_fused(halved(raw))
    assert torch.equal(backlog.rows(backlog.start, 300), halved(whole[backlog.start :]))


def test_a_gap_begins_anew() -> None:
    """Where features are missing in between, those before are given up, and adding says so."""
    backlog = Backlog(50)
    assert backlog.add(Features(0, torch.randn(5, WIDTH)), halved)
    assert not backlog.add(Features(8, torch.randn(2, WIDTH)), halved)
    assert (backlog.start, backlog.end) == (8, 10)
