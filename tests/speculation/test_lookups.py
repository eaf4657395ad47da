"""Every lookup in an engine, mixed in one batch, through tiny pools and aborts: always the target's answer."""

from __future__ import annotations

import random

import pytest

from draft.config import (
    AutoConfig,
    FirstConfig,
    NgramConfig,
    NoSpeculation,
    PredictionConfig,
    SpeculationConfig,
    SuffixConfig,
)
from draft.registry import lookup_proposers
from draft.roster import Roster
from speculation.controller import DraftLengthController
from speculation.cost_model import StepCostModel
from speculation.engine import Engine
from speculation.messages import RequestMetrics, SamplingParams, Submit
from tests.speculation.running import plain_loop
from tests.speculation.token_runner import TokenRunner

CONFIGS: tuple[SpeculationConfig, ...] = (
    NoSpeculation(),
    NgramConfig(),
    NgramConfig(num_speculative_tokens=5, max_n=2),
    SuffixConfig(),
    SuffixConfig(num_speculative_tokens=4),
    SuffixConfig(num_speculative_tokens=4, tree_size=12, min_confidence=0.0),
    SuffixConfig(tree_size=6),
    PredictionConfig(num_speculative_tokens=6),
    FirstConfig(proposers=(NgramConfig(min_n=3, max_n=3), SuffixConfig(num_speculative_tokens=3, tree_size=9))),
    AutoConfig(),
)


def engine_with(num_blocks: int) -> Engine:
    return Engine(
        TokenRunner(num_blocks, 4),
        Roster(lookup_proposers(2**8)),
        DraftLengthController(StepCostModel()),
        model_fingerprint="integers",
        default_config=NoSpeculation(),
        max_num_seqs=8,
        max_num_batched_tokens=48,
        max_waiting=100,
    )


def request(number: int, config: SpeculationConfig, *, salt: str = "") -> Submit:
    """Numbers that are ten apart ask the same question."""
    rng = random.Random(number % 10)
    sampling = SamplingParams(temperature=0.8 * (number % 2), seed=number % 10, max_tokens=24)
    asked = Submit(
        request_id=str(number),
        prompt_token_ids=[rng.randrange(9) for _ in range(rng.randrange(2, 14))],
        sampling=sampling,
        speculation=config,
        cache_salt=salt,
    )
    expected = plain_loop(asked)
    return Submit(
        request_id=asked.request_id,
        prompt_token_ids=asked.prompt_token_ids,
        sampling=sampling,
        speculation=config,
        cache_salt=salt,
        prediction_token_ids=[*expected[:8], 0, *expected[9:]] if number % 3 == 0 else [],
    )


def run(engine: Engine, requests: list[Submit]) -> tuple[dict[str, list[int]], dict[str, RequestMetrics]]:
    """Tokens and metrics of each request, all submitted at once."""
    tokens: dict[str, list[int]] = {each.request_id: [] for each in requests}
    metrics: dict[str, RequestMetrics] = {}
    for each in requests:
        assert engine.submit(each) is None
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
            if output.metrics is not None:
                metrics[output.request_id] = output.metrics
        engine.check()
    return tokens, metrics


@pytest.mark.parametrize("num_blocks", [14, 64])
def test_every_lookup_gives_the_plain_answer(num_blocks: int) -> None:
    """Greedy and sampled, with forced preemption in the small pool, each method's tokens are the plain loop's."""
    requests = [request(number, CONFIGS[number % len(CONFIGS)]) for number in range(30)]
    tokens, metrics = run(engine_with(num_blocks), requests)
    assert tokens == {each.request_id: plain_loop(each) for each in requests}
    assert sum(each.num_accepted_tokens for each in metrics.values()) > 50


def test_a_repeated_question_is_answered_from_the_last_answer() -> None:
    """A finished response is drafted for the same question of the same tenant, and for no other tenant."""
    engine = engine_with(64)
    config = SuffixConfig(num_speculative_tokens=8, length_factor=8.0)
    steps = {}
    for salt, number in (("a", 1), ("a", 11), ("b", 31)):
        tokens, metrics = run(engine, [request(number, config, salt=salt)])
        assert tokens[str(number)] == plain_loop(request(number, config, salt=salt))
        steps[number] = metrics[str(number)].num_steps
    assert steps[11] < 0.6 * steps[1]
    assert steps[31] == steps[1]


def test_a_right_prediction_is_followed_to_its_end() -> None:
    """With one wrong token in it, a predicted output costs one resynchronisation and counts as prediction."""
    engine = engine_with(64)
    tokens, metrics = run(engine, [request(3, PredictionConfig(num_speculative_tokens=6))])
    assert len(tokens["3"]) == 24
    assert metrics["3"].num_accepted_tokens >= 16
    assert engine.stats().counters["accepted_tokens:prediction"] == metrics["3"].num_accepted_tokens


def test_aborts_leave_no_sequence_with_a_proposer() -> None:
    """Whether it finished or was aborted, waiting or running, nobody remembers a sequence."""
    rng = random.Random(5)
    proposers = lookup_proposers(2**8)
    engine = Engine(
        TokenRunner(20, 4),
        Roster(proposers),
        DraftLengthController(StepCostModel()),
        model_fingerprint="integers",
        default_config=AutoConfig(),
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_waiting=100,
    )
    for number in range(30):
        assert engine.submit(request(number, CONFIGS[number % len(CONFIGS)])) is None
    while engine.has_work:
        engine.step()
        engine.check()
        engine.abort(str(rng.randrange(30)))
    assert [len(proposer._lives) for proposer in proposers.values()] == [0, 0, 0]  # type: ignore[attr-defined]
