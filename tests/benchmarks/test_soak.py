"""What the soak takes for a fault."""

from __future__ import annotations

import pytest

from benchmarks.questions import SMALL, read_questions
from benchmarks.soak import LOOK_SECONDS, compare, slope
from benchmarks.soak_client import Case, WrongAnswerError, make_cases


def test_the_slope_is_that_of_the_second_half() -> None:
    """What the start costs is not growth; one MB at each look of the second half is as many MB a minute as looks."""
    assert slope([100.0, 150.0, 180.0, *[200.0] * 4]) == pytest.approx(0.0)
    growing = [100.0] * 10 + [100.0 + look for look in range(10)]
    assert slope(growing) == pytest.approx(60.0 / LOOK_SECONDS)
    assert slope([100.0]) == 0.0


def test_an_answer_with_another_token_is_wrong() -> None:
    """One token too few, too many or another one is a fault; the same tokens are not."""
    case = Case(route="/v1/completions", body={}, token_ids=[1, 2, 3])
    compare(case, [1, 2, 3])
    for tokens in ([1, 2], [1, 2, 3, 4], [1, 2, 4]):
        with pytest.raises(WrongAnswerError):
            compare(case, tokens)


def test_cases_are_the_same_for_the_same_seed() -> None:
    """Both routes, greedy and sampled requests are among them, each with a seed of its own."""
    questions = read_questions(SMALL)
    cases = make_cases(questions, 40, 3)
    assert cases == make_cases(questions, 40, 3)
    assert len({case.route for case in cases}) == 2
    assert {case.body["temperature"] == 0 for case in cases} == {True, False}
    assert len({case.body["seed"] for case in cases}) == 40
