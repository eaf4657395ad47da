"""What is learned of guesses: by class, by sequence, and only from those that were tested."""

from __future__ import annotations

import pytest

from draft.tree import Draft
from speculation.acceptance import FIRST_TRIAL, LAST_TRIAL, AcceptanceModel, TrackRecord


def chain(length: int, match_length: int = 2, source: str = "ngram") -> Draft:
    return Draft.chain(tuple(range(length)), source, match_length=match_length)


def test_face_value_comes_first_and_facts_take_over() -> None:
    """An unknown confidence is believed; after a hundred tests the share that was accepted is."""
    model = AcceptanceModel()
    draft = Draft.chain((1,), "eagle3", confidences=(0.9,))
    assert model.path_chances(draft, 0.0, TrackRecord()) == pytest.approx([0.9])
    for i in range(200):
        model.learn(draft, (0,) if i % 4 == 0 else (), 0.0, TrackRecord())
    assert model.path_chances(draft, 0.0, TrackRecord())[0] == pytest.approx(0.25, abs=0.05)


def test_a_path_is_the_product_of_its_steps() -> None:
    """A node's chance never exceeds its parent's, and siblings share their parent's."""
    draft = Draft((1, 2, 3), (-1, 0, 0), "suffix", (0.8, 0.4, 0.2), 3)
    assert AcceptanceModel().path_chances(draft, 0.0, TrackRecord()) == pytest.approx([0.8, 0.4, 0.2])


def test_classes_are_method_sampling_depth_and_signal() -> None:
    """What is learned of one class leaves others alone."""
    model, record = AcceptanceModel(), TrackRecord()
    others = [(chain(1, 8), 0.0), (chain(1, source="prediction"), 0.0), (chain(1), 1.0)]
    before = [model.path_chances(draft, temperature, record) for draft, temperature in others]
    for _ in range(50):
        model.learn(chain(1), (), 0.0, TrackRecord())
    assert [model.path_chances(draft, temperature, record) for draft, temperature in others] == before
    assert model.path_chances(chain(1), 0.0, record)[0] < 0.1


def test_only_tested_nodes_teach() -> None:
    """Nodes behind the first rejected one were never looked at; children of an accepted node all were."""
    model = AcceptanceModel()
    deep = chain(8)
    before = model.path_chances(deep, 0.0, TrackRecord())
    for _ in range(50):
        model.learn(deep, (0,), 0.0, TrackRecord())
    after = model.path_chances(deep, 0.0, TrackRecord())
    assert after[0] > 0.9
    assert after[1] / after[0] < 0.1
    assert after[5] / after[4] == pytest.approx(before[5] / before[4])


def test_a_sequence_is_told_apart_from_its_class() -> None:
    """A sequence whose guesses fail against the odds is believed less, its neighbours are not."""
    model, unlucky = AcceptanceModel(), TrackRecord()
    for i in range(200):
        model.learn(chain(1), (0,) if i % 4 else (), 0.0, TrackRecord())
    for _ in range(8):
        unlucky.learn(-model.path_chances(chain(1), 0.0, unlucky)[0])
    assert model.path_chances(chain(1), 0.0, unlucky)[0] < 0.8 * model.path_chances(chain(1), 0.0, TrackRecord())[0]


def test_what_happened_last_is_told_apart() -> None:
    """Where guesses come right in runs, one that follows a right one is likelier than one that follows a wrong one."""
    model, record = AcceptanceModel(), TrackRecord()
    for i in range(400):
        model.learn(chain(1), (0,) if i // 10 % 2 == 0 else (), 0.0, record)
    after_wrong = model.path_chances(chain(1), 0.0, TrackRecord(last=record.last))[0]
    model.learn(chain(1), (0,), 0.0, record)
    after_right = model.path_chances(chain(1), 0.0, TrackRecord(last=record.last))[0]
    assert after_wrong < 0.2
    assert after_right > 0.8


def test_chains_not_yet_drawn_are_judged_by_depth() -> None:
    """Before a draft exists its chances are those of earlier ones at each depth, and beyond that of the last known."""
    model, record = AcceptanceModel(), TrackRecord()
    for i in range(300):
        model.learn(chain(2), (0, 1) if i % 2 == 0 else (0,), 0.0, TrackRecord())
    chances = model.chain_chances("ngram", 0.0, 4, record)
    assert chances == sorted(chances, reverse=True)
    assert chances[0] > 0.95
    assert chances[1] / chances[0] == pytest.approx(0.5, abs=0.05)
    assert chances[3] / chances[2] == pytest.approx(0.5, abs=0.05)


def test_trials_come_ever_more_rarely_until_one_succeeds() -> None:
    """What does not pay is tried after 8 guesses left out, then 16, up to 64, and after a success soon again."""
    model, draft = AcceptanceModel(), chain(1)
    gaps: list[int] = []
    since = 0
    while len(gaps) < 6:
        since += 1
        if model.wants_trial(draft, 0.0):
            gaps.append(since)
            since = 0
            model.learn(draft, (), 0.0, TrackRecord())
    assert gaps == [FIRST_TRIAL, 16, 32, LAST_TRIAL, LAST_TRIAL, LAST_TRIAL]
    model.learn(draft, (0,), 0.0, TrackRecord())
    assert [model.wants_trial(draft, 0.0) for _ in range(FIRST_TRIAL)] == [False] * (FIRST_TRIAL - 1) + [True]
