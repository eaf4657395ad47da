"""Predicted output: followed from its start, found again after a miss."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft.config import NgramConfig, PredictionConfig, SpeculationConfig
from draft.prediction import PredictedText, PredictionProposer
from draft.proposer import DraftContext
from draft.tree import Draft
from target.sampling_params import SamplingParams


class Client:
    """One sequence that asked with a prediction, and what it has been answered so far."""

    def __init__(self, prediction: list[int]) -> None:
        self.proposer = PredictionProposer()
        self.tokens = [900, 901]
        self.proposer.start(0, self.tokens, prediction=prediction)

    def answer(self, *token_ids: int) -> None:
        """The target said these."""
        self.tokens += token_ids
        self.proposer.commit(0, token_ids, None)

    def draft(self, limit: int = 4, config: SpeculationConfig | None = None) -> Draft:
        """What comes next, says the prediction."""
        context = DraftContext(0, self.tokens, 2, SamplingParams(), config or PredictionConfig())
        (draft,) = self.proposer.propose([context], [limit])
        return draft


def test_the_prediction_is_followed_from_its_start() -> None:
    """Nothing said yet, the prediction's first tokens are drafted, then those behind what was said, to its end."""
    client = Client([1, 2, 3, 4, 5])
    assert client.draft().token_ids == (1, 2, 3, 4)
    client.answer(1, 2, 3)
    draft = client.draft()
    assert (draft.token_ids, draft.source, draft.match_length) == ((4, 5), "prediction", 3)
    client.answer(4, 5)
    assert client.draft().skipped == "no_match"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ([10, 11, 99, 13], (14, 15)),  # one token replaced
        ([10, 11, 99, 98, 12], (13, 14)),  # two inserted
        ([10, 11, 15], (16, 17)),  # some left out
        ([10, 11, 99], ()),  # lost
        ([99, 10], (11, 12)),  # something said in front of it
    ],
)
def test_it_is_found_again_after_a_miss(said: list[int], expected: tuple[int, ...]) -> None:
    """A replaced, inserted or omitted token costs the draft until the next token that agrees nearby."""
    client = Client(list(range(10, 40)))
    client.answer(*said)
    assert client.draft(2).token_ids == expected


def test_far_away_two_tokens_must_agree() -> None:
    """One token of agreement far from where the prediction was lost is chance; two are not, and more count more."""
    client = Client(list(range(100)))
    client.answer(0, 500, 80)
    assert client.draft(2).skipped == "no_match"
    client.answer(81)
    assert client.draft(2).token_ids == (82, 83)
    client.answer(500, 20, 21, 22, 23)
    assert client.draft(2).token_ids == (24, 25)


def test_of_several_places_the_next_one_is_taken() -> None:
    """Tokens that repeat in the prediction are found behind the place where it was lost, if they stand there."""
    client = Client([1, 2, 3, 7, 1, 2, 4, 8, 1, 2, 5, 9])
    client.answer(1, 2, 3, 99, 1, 2)
    assert client.draft(2).token_ids == (4, 8)


@given(prediction=st.lists(st.integers(0, 4), max_size=30), output=st.lists(st.integers(0, 4), max_size=40))
def test_what_is_drafted_stands_behind_what_was_said(prediction: list[int], output: list[int]) -> None:
    """The match length counts newest tokens that stand in the prediction before the place drafted from."""
    text = PredictedText(prediction)
    for i, token_id in enumerate(output):
        text.follow(token_id)
        if text.position is not None:
            assert 1 <= text.match_length <= i + 1
            matched = prediction[text.position - text.match_length : text.position]
            assert matched == output[i + 1 - text.match_length : i + 1]


def test_without_a_prediction_there_is_no_match() -> None:
    """A request that predicted nothing gets no drafts, and the number asked for bounds those of others."""
    assert Client([]).draft().skipped == "no_match"
    assert Client([1, 2, 3]).draft(8, PredictionConfig(num_speculative_tokens=2)).token_ids == (1, 2)


def test_verbs_out_of_order_raise() -> None:
    """A second start, a foreign config, tokens not committed, and a sequence that has finished are refused."""
    client = Client([1])
    with pytest.raises(ValueError, match="started already"):
        client.proposer.start(0, [])
    with pytest.raises(ValueError, match="takes a PredictionConfig"):
        client.draft(1, NgramConfig())
    client.tokens.append(1)
    with pytest.raises(ValueError, match="commit comes before propose"):
        client.draft()
    client.proposer.finish(0)
    with pytest.raises(ValueError, match="has finished"):
        client.proposer.commit(0, [1], None)
