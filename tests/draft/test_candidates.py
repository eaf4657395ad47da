"""Candidates are ranked by the target's own rule: the first is what the target would choose from the same logits."""

from __future__ import annotations

import pytest
import torch

from draft.candidates import best_candidates
from target.sampling import SamplingRow, TokenCounts, sample
from target.sampling_params import SamplingParams

PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "biased": SamplingParams(temperature=0.0, logit_bias={3: 4.0, 20: -9.0, 49: 2.0}),
    "sampled": SamplingParams(temperature=0.9, seed=4),
    "filtered": SamplingParams(temperature=1.2, seed=5, top_k=7, top_p=0.8, min_p=0.02),
    "penalised": SamplingParams(temperature=0.7, seed=6, presence_penalty=0.8, repetition_penalty=1.3),
}
KEPT = torch.tensor([0, 3, 4, 9, 17, 20, 21, 33, 40, 48])


def rows_with(params: SamplingParams, count: int) -> list[SamplingRow]:
    counts = TokenCounts(frozenset({3, 5, 40}), {17: 2, 21: 1})
    return [SamplingRow(params, 10 + i, banned_token_ids=(4, 5), counts=counts, path=(20,)) for i in range(count)]


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_the_first_candidate_is_what_sampling_chooses(params: SamplingParams) -> None:
    """Over the whole vocabulary and over a part of it, with bans, bias, penalties, filters and noise."""
    logits = torch.randn(40, 50, generator=torch.Generator().manual_seed(1)) * 2
    rows = rows_with(params, 40)
    whole = best_candidates(logits, rows, torch.arange(50), 4)
    assert [ids[0] for ids in whole.token_ids] == sample(logits, rows).token_ids
    masked = torch.full_like(logits, -torch.inf)
    masked[:, KEPT] = logits[:, KEPT]
    part = best_candidates(logits[:, KEPT], rows, KEPT, 4)
    assert [ids[0] for ids in part.token_ids] == sample(masked, rows).token_ids
    assert all(set(ids) <= set(KEPT.tolist()) for ids in part.token_ids)


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_chances_fall_and_are_chances(params: SamplingParams) -> None:
    """Every row's chances fall from the best on and add up to at most one."""
    logits = torch.randn(20, 10, generator=torch.Generator().manual_seed(2))
    for chances in best_candidates(logits, rows_with(params, 20), KEPT, 6).chances:
        assert chances == sorted(chances, reverse=True)
        assert 0.0 < chances[0] <= sum(chances) <= 1.0 + 1e-9


def test_greedy_chances_are_the_softmax() -> None:
    """Without noise a chance is the head's own probability."""
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(3))
    found = best_candidates(logits, [SamplingRow(SamplingParams(temperature=0.0), i) for i in range(3)], KEPT, 10)
    expected = logits.softmax(-1).sort(descending=True).values
    torch.testing.assert_close(torch.tensor(found.chances), expected)


def test_of_a_large_vocabulary_only_the_likeliest_get_noise() -> None:
    """Behind a thousand better tokens hardly any is chosen, so the first candidate is still what sampling chooses."""
    logits = torch.randn(200, 5000, generator=torch.Generator().manual_seed(4)) * 4
    rows = [SamplingRow(SamplingParams(temperature=0.9, seed=7), i) for i in range(200)]
    found = best_candidates(logits, rows, torch.arange(5000), 3)
    chosen = sample(logits, rows).token_ids
    assert sum(ids[0] == token_id for ids, token_id in zip(found.token_ids, chosen, strict=True)) >= 198
    assert all(len(set(ids)) == 3 for ids in found.token_ids)
