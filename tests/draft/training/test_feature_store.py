"""Recordings on disk: what was written comes back, a kill costs the last sequence at most, and room is bounded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from draft.config import Eagle3Config
from draft.proposer import DraftContext, Features
from draft.training.feature_store import FeatureStore, StoreFormat
from draft.training.recorder import FeatureRecorder, prompt_key
from speculation.messages import SamplingParams

FORM = StoreFormat("target", (1, -1), 4)


def store_in(folder: Path, form: StoreFormat = FORM, max_bytes: int = 10_000) -> FeatureStore:
    return FeatureStore(folder, form, max_bytes=max_bytes)


def numbers(first: int, count: int) -> np.ndarray:
    return np.arange(first * 8, (first + count) * 8, dtype=np.float32).reshape(count, 8)


def test_what_was_recorded_comes_back(tmp_path: Path) -> None:
    """Tokens and features of each sequence, the newest token's being zero, also after opening the folder again."""
    store = store_in(tmp_path)
    store.append([5, 6, 7], numbers(0, 2), num_prompt_tokens=1, key="a")
    store.append([8, 9], numbers(10, 1), num_prompt_tokens=2, key="b")
    for opened in (store, store_in(tmp_path)):
        assert opened.tokens().tolist() == [5, 6, 7, 8, 9]
        assert opened.features()[[0, 1, 3]].tolist() == [*numbers(0, 2).tolist(), *numbers(10, 1).tolist()]
        assert not opened.features()[[2, 4]].any()
        assert [(s.start, s.num_tokens, s.num_prompt_tokens, s.key) for s in opened.sequences] == [
            (0, 3, 1, "a"),
            (3, 2, 2, "b"),
        ]


def test_what_a_kill_left_half_written_is_cut_off(tmp_path: Path) -> None:
    """Data without a line in the index, and half a line, are gone when the store is opened again."""
    store_in(tmp_path).append([5, 6, 7], numbers(0, 2), num_prompt_tokens=1, key="a")
    with (tmp_path / "features.f16").open("ab") as file:
        file.write(b"half a row")
    with (tmp_path / "index.jsonl").open("a") as file:
        file.write('{"start": 3, "num_')
    store = store_in(tmp_path)
    store.append([8, 9], numbers(10, 1), num_prompt_tokens=2, key="b")
    assert store_in(tmp_path).tokens().tolist() == [5, 6, 7, 8, 9]
    assert store_in(tmp_path).features()[3].tolist() == numbers(10, 1)[0].tolist()


def test_no_more_disk_than_allowed_is_used(tmp_path: Path) -> None:
    """A sequence that does not fit is dropped, and the store says that it is full."""
    store = store_in(tmp_path, max_bytes=4 * 20)
    store.append([1, 2, 3], numbers(0, 3), num_prompt_tokens=0, key="a")
    found = [store.is_full]
    store.append([4, 5], numbers(0, 2), num_prompt_tokens=0, key="b")
    assert [*found, store.is_full] == [False, True]
    assert store.tokens().tolist() == [1, 2, 3]


def test_another_target_s_recordings_are_refused(tmp_path: Path) -> None:
    """A folder is continued only for the same target, and layers that it has."""
    store_in(tmp_path)
    assert store_in(tmp_path, StoreFormat("target", (-1,), 4)).form == FORM
    for other in (
        StoreFormat("another", (1, -1), 4),
        StoreFormat("target", (2, -1), 4),
        StoreFormat("target", (1, -1), 8),
    ):
        with pytest.raises(ValueError, match="use another folder"):
            store_in(tmp_path, other)


def test_the_recorder_keeps_each_feature_once(tmp_path: Path) -> None:
    """Chunks, features computed again after a preemption, and a late beginning behind a prefix hit are put in order."""
    store = store_in(tmp_path)
    recorder = FeatureRecorder(store)
    states = torch.from_numpy(numbers(0, 9))
    recorder.start(1, [10, 11, 12, 13])
    recorder.commit(1, [], Features(2, states[2:3]))
    recorder.commit(1, [14, 15], Features(2, states[2:5]))
    assert recorder.propose([DraftContext(1, [], 4, SamplingParams(), Eagle3Config())], [3])[0].skipped == "not_ready"
    recorder.commit(1, [16], Features(5, states[5:6]))
    recorder.finish(1)
    recorder.start(2, [10])
    recorder.finish(2)
    assert store.tokens().tolist() == [12, 13, 14, 15, 16]
    assert store.features()[:4].tolist() == numbers(2, 4).tolist()
    assert store.sequences[0].num_prompt_tokens == 2
    assert store.sequences[0].key == prompt_key([10, 11, 12, 13])
    assert len(store.sequences) == 1
