"""The benchmark of never slower: who is asked when, and what is made of the answers."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.methods import Method
from benchmarks.never_slower import Pair, Traffic, measure, row_of, speed
from benchmarks.system import Answer, Arrival, Ask


def answer_of(token_ids: list[int], seconds: float, *, accepted: int = 0) -> Answer:
    arrivals = [Arrival(0.1, 1), Arrival(0.1 + seconds, len(token_ids) - 1)]
    return Answer(token_ids=token_ids, arrivals=arrivals, num_drafts=3, num_accepted=accepted)


class FakeService:
    """Answers at once, plain decoding in 2 s and the rest in 1; it notes what it was asked."""

    description = "fake"

    def __init__(self, spoiled: str = "") -> None:
        self.asked: list[tuple[str, str, int]] = []
        self._spoiled = spoiled

    async def chat(
        self, ask: Ask, speculation: dict[str, Any], *, temperature: float, top_p: float, salt: str, ignore_eos: bool
    ) -> Answer:
        method = speculation["method"]
        self.asked.append((method, salt, ask.seed))
        token_ids = [ask.seed, 2, 3] if method != self._spoiled else [ask.seed, 2, 4]
        return answer_of(token_ids, 2.0 if method == "none" else 1.0)

    def cpu_seconds(self) -> float | None:
        return None


def groups(size: int) -> list[list[Ask]]:
    asks = [Ask(messages=[], token_ids=[1], num_tokens=3, seed=seed) for seed in range(4)]
    return [asks[first : first + size] for first in range(0, 4, size)]


def test_one_request_is_timed_behind_its_first_token_and_several_together() -> None:
    """Alone: the tokens behind the first over the time they took; of several all tokens over the longest time."""
    one = answer_of([1, 2, 3], 0.5)
    assert speed([one]) == pytest.approx(4.0)
    assert speed([one, answer_of([1, 2, 3], 1.9)]) == pytest.approx(3.0)


def test_a_row_has_the_ratio_of_medians_and_its_spread() -> None:
    """A method that is a tenth slower throughout has a ratio of 0.9, whatever the machine did meanwhile."""
    plain = [100.0, 50.0, 100.0, 200.0, 100.0]
    pairs = [Pair(each, 0.9 * each, [answer_of([1, 2, 3], 1.0, accepted=1)], is_exact=True) for each in plain]
    row = row_of("words", "auto", pairs)
    assert row.ratio == pytest.approx(0.9)
    assert row.ratio_low <= row.ratio <= row.ratio_high
    assert (row.num_pairs, row.num_drafts, row.num_accepted, row.num_steps, row.exact) == (5, 15, 5, 5, True)


@pytest.mark.parametrize("size", [1, 2])
async def test_requests_take_turns(size: int) -> None:
    """Each group goes to both, in alternating order, and neither sees the other's answers."""
    service = FakeService()
    traffic = Traffic("words", 0.0, groups(size))
    row = await measure(service, traffic, Method("auto", {"method": "auto"}))  # type: ignore[arg-type]
    first_asked = [method for method, _, _ in service.asked[:: 2 * size]]
    assert first_asked == (["auto", "none"] * 4)[: 4 // size]
    salts = {method: {salt for asked, salt, _ in service.asked if asked == method} for method in ("none", "auto")}
    assert not salts["none"] & salts["auto"]
    # Requests that come one by one may learn of one another; groups are each new.
    assert len(salts["auto"]) == (1 if size == 1 else 2)
    assert row.exact
    assert row.ratio > 1.0


async def test_a_changed_answer_is_noticed() -> None:
    """Other token ids than plain decoding's make the row inexact."""
    traffic = Traffic("words", 0.0, groups(1))
    row = await measure(FakeService(spoiled="auto"), traffic, Method("auto", {"method": "auto"}))  # type: ignore[arg-type]
    assert not row.exact
