"""Sampling by coupling: the right distribution, filters in the right order, rows that do not disturb one another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from target.native.choosing import PARAMETERS, choose_rows
from target.native.isa import native_supported
from target.noise import gumbel, noise_keys
from target.sampling import SamplingRow, TokenCounts, choose, sample, score
from target.sampling_params import SamplingParams


def rows_of(params: SamplingParams, num_rows: int, start: int = 0) -> list[SamplingRow]:
    return [SamplingRow(params, start + i) for i in range(num_rows)]


def frequencies(logits: torch.Tensor, params: SamplingParams, num_rows: int = 20_000) -> np.ndarray:
    """How often each token is chosen at so many positions."""
    chosen = sample(logits.expand(num_rows, -1), rows_of(params, num_rows)).token_ids
    return np.bincount(chosen, minlength=logits.shape[-1])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_choices_follow_the_tempered_softmax(temperature: float) -> None:
    """Over many positions tokens come as often as softmax(logits / T) says (chi-square, fixed seed)."""
    logits = torch.tensor([0.3, -1.2, 2.0, 0.9, -0.4, 1.1])
    counts = frequencies(logits, SamplingParams(temperature=temperature, seed=42))
    expected = (logits / temperature).softmax(-1).double().numpy()
    assert stats.chisquare(counts, expected / expected.sum() * counts.sum()).pvalue > 0.01


def test_seeds_and_positions_give_independent_noise() -> None:
    """Noise is standard Gumbel, and uncorrelated between neighbouring seeds, positions and tokens."""
    keys = noise_keys(np.arange(200, dtype=np.uint64).repeat(50), np.tile(np.arange(50), 200))
    noise = gumbel(torch.from_numpy(keys)[:, None], torch.arange(20)).numpy()
    assert stats.kstest(noise.ravel(), stats.gumbel_r.cdf).pvalue > 0.01
    cube = noise.reshape(200, 50, 20)
    for axis in range(3):
        a, b = np.swapaxes(cube, 0, axis)[:-1].ravel(), np.swapaxes(cube, 0, axis)[1:].ravel()
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.01


def test_the_noise_is_fixed_forever() -> None:
    """Seeds are promises to users: these values must not change with versions, machines or devices."""
    keys = noise_keys(np.array([0, 1, 2**64 - 1], np.uint64), np.array([0, 17, 8191]))
    assert keys.tolist() == [-8469215461636344404, -2217526637977186554, -348081777876826379]
    values = gumbel(torch.from_numpy(keys), torch.tensor([0, 5, 49151]))
    assert values.tolist() == pytest.approx([0.35759470290937295, 0.26812407818343403, 0.14736623967339674], rel=1e-12)


def brute_filter(logits: torch.Tensor, params: SamplingParams) -> set[int]:
    """Tokens that survive min-p, top-k and top-p in that order, by sorting."""
    probs = (logits.double() / params.temperature).softmax(-1)
    order = sorted(range(len(probs)), key=lambda i: (-float(probs[i]), i))
    order = [i for i in order if probs[i] >= params.min_p * probs.max()]
    order = order[: params.top_k or len(order)]
    total, before, kept = sum(float(probs[i]) for i in order), 0.0, set()
    for i in order:
        if before < params.top_p * total:
            kept.add(i)
        before += float(probs[i])
    return kept


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=0.7, seed=1),
        SamplingParams(top_k=5, seed=2),
        SamplingParams(min_p=0.1, seed=3),
        SamplingParams(temperature=1.7, min_p=0.02, top_k=9, top_p=0.8, seed=4),
        SamplingParams(temperature=0.6, top_p=0.0001, seed=5),
    ],
)
def test_filters_keep_exactly_the_right_tokens(params: SamplingParams) -> None:
    """Over many positions the chosen tokens are all those that min-p, top-k and top-p leave, and no other."""
    logits = torch.linspace(-2.0, 2.0, 24)[torch.randperm(24, generator=torch.Generator().manual_seed(3))]
    counts = frequencies(logits, params)
    assert {int(i) for i in np.flatnonzero(counts)} == brute_filter(logits, params)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=1),
        SamplingParams(top_p=0.9, seed=2),
        SamplingParams(top_k=50, top_p=0.5, seed=3),
        SamplingParams(min_p=0.01, repetition_penalty=1.2, seed=4),
    ],
)
def test_a_row_is_chosen_as_if_it_were_alone(params: SamplingParams) -> None:
    """Rows of different parameters in one batch say what each says alone, ties in the logits included."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(9, 40_000, generator=generator) * 3).round(decimals=1)
    counts = TokenCounts(frozenset({5, 6}), {7: 2})
    others = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=9, temperature=1.5),
        SamplingParams(top_k=3, top_p=0.4),
    ]
    rows = [SamplingRow(params if i % 2 else others[i % 3], 100 + i, counts=counts) for i in range(9)]
    together = sample(logits, rows).token_ids
    assert together == [sample(logits[i : i + 1], rows[i : i + 1]).token_ids[0] for i in range(9)]


@pytest.mark.parametrize("vocab_size", [24, 2500])
@pytest.mark.parametrize("top_k", [2**31, 2**61 - 1, 2**61, 2**62, 2**63 - 1])
def test_a_top_k_above_the_vocabulary_keeps_every_token(top_k: int, vocab_size: int) -> None:
    """In the native and in the torch chooser alike, however large it is and whatever filters come with it."""
    logits = torch.randn(8, vocab_size, generator=torch.Generator().manual_seed(1)) * 2
    filters: tuple[dict[str, Any], ...] = ({}, {"top_p": 0.7}, {"min_p": 0.01, "top_p": 0.9})
    for others in filters:
        rows = rows_of(SamplingParams(top_k=top_k, seed=6, **others), 8)
        expected = sample(logits, rows_of(SamplingParams(top_k=vocab_size, seed=6, **others), 8)).token_ids
        assert sample(logits, rows).token_ids == expected
        assert choose(logits, rows).tolist() == expected


@pytest.mark.parametrize("top_k", [2**61, 2**62 + 1, 2**63 - 1])
def test_the_native_chooser_bounds_top_k_itself(top_k: int) -> None:
    """A `top_k` that overflows when it is multiplied writes nothing outside of the scratch array."""
    if not native_supported()[0]:
        pytest.skip("the processor cannot run the native chooser")
    size = 2500
    logits = torch.randn(1, size, generator=torch.Generator().manual_seed(1))
    parameters = np.array([(1.0, -np.inf, 1.0, top_k, 0, 99)], PARAMETERS)
    scratch = np.full(size + 16 + 4096, 7, np.uint64)
    chosen = np.empty(1, np.int64)
    choose_rows(logits.data_ptr(), 4 * size, size, parameters, scratch[: size + 16], chosen)
    assert (scratch[size + 16 :] == 7).all()
    assert 0 <= chosen[0] < size


def test_greedy_takes_the_first_of_equals() -> None:
    """Among equal logits the lowest token id wins, wherever they are."""
    logits = torch.zeros(3, 30_000)
    logits[0, [7, 29_000]] = 1.0
    logits[1, [20_000, 20_001]] = 1.0
    assert sample(logits, rows_of(SamplingParams(temperature=0.0), 3)).token_ids == [7, 20_000, 0]


def test_penalties_follow_their_definitions() -> None:
    """Repetition divides or multiplies by sign over all tokens; presence and frequency subtract over the output."""
    logits = torch.tensor([[2.0, -1.0, 3.0, 3.2, 0.0]])
    counts = TokenCounts(frozenset({0, 1}), {3: 2})

    def chosen(**values: float) -> int:
        row = SamplingRow(SamplingParams(temperature=0.0, **values), 9, counts=counts, path=(2,))  # type: ignore[arg-type]
        return sample(logits, [row]).token_ids[0]

    assert chosen() == 3
    assert chosen(frequency_penalty=0.15) == 3  # 3.2 - 0.3 against 3.0 - 0.15: the path's token counts once
    assert chosen(frequency_penalty=0.25) == 2
    assert chosen(presence_penalty=0.3) == 3
    assert chosen(presence_penalty=1.5) == 0
    assert chosen(repetition_penalty=2.0) == 3
    seen = SamplingRow(
        SamplingParams(temperature=0.0, repetition_penalty=2.0), 9, counts=TokenCounts(frozenset({0}), {})
    )
    assert sample(torch.tensor([[-1.0, -1.5]]), [seen]).token_ids == [1]
    assert sample(torch.tensor([[1.0, 0.6]]), [seen]).token_ids == [1]
    assert sample(torch.tensor([[1.0, 0.4]]), [seen]).token_ids == [0]


def test_bans_and_biases_beat_logits() -> None:
    """A banned token is never chosen, even with a bias; a bias of 100 forces a token."""
    logits = torch.tensor([[0.0, 5.0, 1.0]])
    greedy = SamplingParams(temperature=0.0)
    assert sample(logits, [SamplingRow(greedy, 0, banned_token_ids=(1,))]).token_ids == [2]
    biased = SamplingParams(temperature=1.0, logit_bias={0: 100.0, 1: 100.0}, seed=1)
    assert sample(logits, [SamplingRow(biased, 0, banned_token_ids=(1,))]).token_ids == [0]
    assert logits.tolist() == [[0.0, 5.0, 1.0]]


def test_scores_are_logprobs_with_ranks() -> None:
    """A token's logprob is its log softmax, its rank one more than the number of likelier tokens."""
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]])
    (row,) = score(logits, torch.tensor([2]), 2)
    expected = logits.log_softmax(-1)[0]
    assert row.logprob == pytest.approx(float(expected[2]), abs=1e-6)
    assert row.rank == 2
    assert row.top_token_ids == [1, 2]
    assert row.top_logprobs == pytest.approx([float(expected[1]), float(expected[2])], abs=1e-6)


def test_coupled_acceptance_is_at_least_its_bound() -> None:
    """Two distributions over four tokens with total variation TV agree in at least (1 - TV) / (1 + TV) of the draws."""
    target_logits, draft_logits = torch.tensor([1.0, 0.2, -0.5, 0.0]), torch.tensor([0.4, 0.9, -1.0, 0.1])
    params, num_rows = SamplingParams(seed=8), 40_000
    chosen = [
        np.array(sample(x.expand(num_rows, -1), rows_of(params, num_rows)).token_ids)
        for x in (target_logits, draft_logits)
    ]
    distance = float((target_logits.softmax(-1) - draft_logits.softmax(-1)).abs().sum() / 2)
    rate = float((chosen[0] == chosen[1]).mean())
    # Exactly: sum over tokens of 1 / sum_j max(p_j / p_i, q_j / q_i), the two argmaxes of shared exponential races.
    p, q = target_logits.softmax(-1).double(), draft_logits.softmax(-1).double()
    exact = float(sum(1 / torch.maximum(p / p[i], q / q[i]).sum() for i in range(4)))
    assert rate >= (1 - distance) / (1 + distance) - 0.01
    assert rate == pytest.approx(exact, abs=0.01)


def test_an_empty_batch_is_fine() -> None:
    """No rows, no choices."""
    assert sample(torch.zeros(0, 4), []).token_ids == []


def test_a_filtered_neighbour_cuts_nothing_from_an_unfiltered_row() -> None:
    """The least likely token can be chosen, also where another row of the batch is filtered."""
    logits = torch.full((2, 30_000), -40.0)
    logits[:, 0] = 0.0
    unfiltered, filtered = SamplingParams(seed=1, logit_bias={29_999: 100.0}), SamplingParams(seed=1, top_p=0.5)
    rows = [SamplingRow(unfiltered, 5), SamplingRow(filtered, 5)]
    assert sample(logits, rows).token_ids == [29_999, 0]
    flat = torch.zeros(2, 3000)
    flat[:, 7] = 1e-3
    for position in range(300):
        alone = sample(flat[:1], [SamplingRow(SamplingParams(seed=2), position)]).token_ids
        beside = [SamplingRow(SamplingParams(seed=2), position), SamplingRow(filtered, position)]
        assert sample(flat, beside).token_ids[:1] == alone


def random_params(rng: np.random.Generator) -> SamplingParams:
    """Any mix of temperature and filters."""
    return SamplingParams(
        temperature=float(rng.choice([0.0, 0.3, 0.8, 1.0, 1.7])),
        top_p=float(rng.choice([1.0, 1.0, 0.99, 0.9, 0.5])),
        top_k=int(rng.choice([0, 0, 1, 5, 50, 3000])),
        min_p=float(rng.choice([0.0, 0.0, 0.05, 0.5])),
        seed=int(rng.integers(2**63)),
    )


@pytest.mark.parametrize("vocab_size", [5, 16, 211, 4099])
def test_the_native_chooser_chooses_what_the_specification_does(vocab_size: int) -> None:
    """On flat and peaked logits, with ties, bans and every mix of filters, the same tokens come out."""
    rng = np.random.default_rng(vocab_size)
    for trial in range(60):
        logits = torch.from_numpy(rng.normal(size=(3, vocab_size)) * rng.choice([0.1, 1.0, 5.0]) + rng.choice([0, 40]))
        logits = (logits.round(decimals=1) if trial % 3 == 0 else logits).float()
        if trial % 4 == 0:
            logits[:, ::3] = -torch.inf
        rows = [SamplingRow(random_params(rng), int(rng.integers(8000))) for _ in range(3)]
        assert sample(logits, rows).token_ids == choose(logits, rows).tolist()
