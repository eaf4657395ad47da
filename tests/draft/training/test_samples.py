"""Samples of a store: what training needs at least."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from draft.training.feature_store import FeatureStore, StoreFormat
from draft.training.samples import Samples


def test_too_few_sequences_are_counted(tmp_path: Path) -> None:
    """The error says how many sequences there are, how they split, and how many prompts to use."""
    store = FeatureStore(tmp_path, StoreFormat("target", (1, -1), 4), max_bytes=10_000)
    store.append(list(range(9)), np.zeros((8, 8), np.float32), num_prompt_tokens=1, key="ffffff")
    counted = r"1 sequences were recorded.* 1 windows are for training and 0 for validation.*at least 125 prompts"
    with pytest.raises(ValueError, match=counted):
        Samples(store, feature_layers=(1,), window=16)
