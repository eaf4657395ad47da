from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from cache_store.metadata import StoreUnavailable
from service.errors import ApiError
from service.experiments import book as books
from service.experiments import manager as managers
from service.experiments.evaluator import Evaluator
from service.experiments.manager import Experiments, Served
from service.experiments.store import ExperimentStore, MemoryExperimentStore
from service.experiments.tally import Outcome
from speculation.messages import NgramConfig, NoSpeculation, SpeculationConfig
from tests.service.experiments.traffic import Law, definition, facts

SERVED = Served(methods=frozenset({"none", "ngram"}), models=["m"], routes=["/v1/chat/completions"])


class Clock:
    """Seconds since the epoch, as a test says."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def salts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experiments here assign alike in every run: what they conclude is a matter of the law's seed alone."""
    number = itertools.count()
    monkeypatch.setattr(books, "secrets", SimpleNamespace(token_hex=lambda _: f"salt-{next(number)}"))


def front(store: ExperimentStore, clock: Clock | None = None, **changes: Any) -> Experiments:
    return Experiments(store, served=lambda: SERVED, clock=clock or Clock(), **changes)


def drive(experiments: Experiments, law: Law, num: int, *, first: int = 0) -> None:
    """Requests that are assigned, answered and counted."""
    for number in range(first, first + num):
        known = law.facts(number)
        assigned = experiments.assign(known)
        if assigned is not None:
            experiments.observe(assigned, law.outcome(known, assigned.request.place.arm))


def state(experiments: Experiments) -> tuple[str, SpeculationConfig | None]:
    """How the experiment stands, and the default."""
    return experiments.book.experiments["lookup"].status, experiments.default


def is_cooling_down(experiments: Experiments) -> bool:
    return experiments.book.experiments["lookup"].is_cooling_down


async def look(*fronts: Experiments) -> None:
    """What happens every few hundred milliseconds, and then every two seconds."""
    for one in fronts:
        await one._share()
    for one in fronts:
        await one._evaluate()
    for one in fronts:
        await one._share()


async def test_requests_get_arms_and_say_so() -> None:
    """An assigned request has the arm's config, and names experiment and arm in headers."""
    experiments = front(MemoryExperimentStore())
    assert experiments.assign(facts()) is None
    await experiments.create(definition())
    found = [experiments.assign(facts(number)) for number in range(50)]
    assert {type(one.speculation) for one in found if one} == {NoSpeculation, NgramConfig}
    assert {tuple(one.headers.items()) for one in found if one} == {
        (("X-Forerun-Experiment", "lookup"), ("X-Forerun-Arm", arm)) for arm in ("plain", "ngram-8")
    }


async def test_a_request_with_its_own_config_stays_out() -> None:
    """Neither is it assigned nor does it count; the same holds for what the filter does not take."""
    experiments = front(MemoryExperimentStore())
    await experiments.create(definition(filter={"min_prompt_tokens": 50}))
    assert experiments.assign(facts(has_own_speculation=True)) is None
    assert experiments.assign(facts(num_prompt_tokens=10)) is None
    assert experiments.assign(facts()) is not None


async def test_a_winner_is_promoted_and_watched() -> None:
    """The service finds the faster arm, makes it the default, compares it for the cool-down, and then is done."""
    clock = Clock()
    experiments = front(MemoryExperimentStore(), clock)
    law = Law(1, (1.0, 0.7))
    await experiments.create(definition(at_end={"action": "promote", "cool_down_seconds": 60, "holdback": 0.3}))
    drive(experiments, law, 1500)
    await look(experiments)
    assert state(experiments) == ("promoted", NgramConfig(num_speculative_tokens=8))
    assert "safe to promote" in experiments.book.experiments["lookup"].ended_because
    drive(experiments, law, 300, first=1500)
    await look(experiments)
    assert is_cooling_down(experiments)
    assert (await experiments.report("lookup")).num_samples == 300
    clock.now += 61.0
    await look(experiments)
    assert not is_cooling_down(experiments)
    assert experiments.default == NgramConfig(num_speculative_tokens=8)
    assert experiments.assign(facts()) is None
    assert (await experiments.report("lookup")).num_samples == 1500


async def test_a_promotion_that_turns_out_slow_is_rolled_back() -> None:
    """What was faster becomes slower during the cool-down: the old default returns, and the reason is kept."""
    experiments = front(MemoryExperimentStore())
    await experiments.put_profile("old", NoSpeculation(), is_default=True)
    await experiments.create(definition(at_end={"action": "promote", "holdback": 0.4}))
    drive(experiments, Law(1, (1.0, 0.7)), 1500)
    await look(experiments)
    assert experiments.default == NgramConfig(num_speculative_tokens=8)
    drive(experiments, Law(2, (1.0, 1.8)), 1500)
    await look(experiments)
    ended = experiments.book.experiments["lookup"]
    assert state(experiments) == ("stopped", NoSpeculation())
    assert ended.promotion is not None
    assert "keep plain" in ended.promotion.reason


async def test_a_guardrail_that_breaks_after_promotion_rolls_back() -> None:
    """Failures of the promoted arm take it back, though its tokens are still faster."""
    experiments = front(MemoryExperimentStore())
    rails = [{"metric": "error_rate", "limit": 0.05}]
    await experiments.create(definition(at_end="promote", guardrails=rails))
    drive(experiments, Law(1, (1.0, 0.7)), 1500)
    await look(experiments)
    assert experiments.default is not None
    for number in range(200):
        assigned = experiments.assign(facts(number))
        assert assigned is not None
        experiments.observe(assigned, Outcome(status="failed"))
    await look(experiments)
    assert state(experiments) == ("stopped", None)


async def test_equal_arms_are_not_promoted() -> None:
    """An A/A experiment runs to its end, reports that nothing was found, and changes nothing."""
    experiments = front(MemoryExperimentStore())
    await experiments.create(definition(at_end="promote", max_samples=800))
    for part in range(10):
        drive(experiments, Law(part), 100, first=100 * part)
        await look(experiments)
    ended = experiments.book.experiments["lookup"]
    assert state(experiments) == ("stopped", None)
    assert "No arm is shown to be faster" in ended.ended_because


async def test_report_only_changes_nothing() -> None:
    """With `report` a winner ends the experiment and the default stays."""
    experiments = front(MemoryExperimentStore())
    await experiments.create(definition())
    drive(experiments, Law(1, (1.0, 0.7)), 1500)
    await look(experiments)
    assert state(experiments) == ("stopped", None)


async def test_adaptive_weights_follow_the_faster_arm() -> None:
    """After enough requests the better arm gets more, the other at least the floor; the estimate stays right."""
    clock = Clock()
    experiments = front(MemoryExperimentStore(), clock)
    await experiments.create(definition(allocation="adaptive", expected_effect=0.01, max_samples=1_000_000))
    law = Law(3, (1.0, 0.95))
    for part in range(6):
        drive(experiments, law, 100, first=100 * part)
        clock.now += 11.0
        await look(experiments)
    weights = experiments.book.experiments["lookup"].weights
    assert weights[1] > 0.6
    assert weights[0] >= 0.1 - 1e-9
    one = (await experiments.report("lookup")).comparisons[0].adjusted
    assert one.low is not None
    assert one.high is not None
    assert one.low < 1 / 0.95 - 1 < one.high


async def test_promotion_by_hand_needs_support_or_a_name() -> None:
    """Without a winner `promote` is refused with the verdict; naming an arm overrides, an unknown arm is an error."""
    experiments = front(MemoryExperimentStore())
    await experiments.create(definition())
    with pytest.raises(ApiError, match="Collecting"):
        await experiments.promote("lookup")
    with pytest.raises(ApiError, match="did you mean 'plain'"):
        await experiments.promote("lookup", "plan")
    promoted = await experiments.promote("lookup", "ngram-8")
    assert promoted.promotion is not None
    assert promoted.promotion.by_hand
    assert experiments.default == NgramConfig(num_speculative_tokens=8)


async def test_an_audit_that_diverges_ends_the_experiment() -> None:
    """One audited request with other tokens stops it, naming the arm."""
    experiments = front(MemoryExperimentStore())
    await experiments.create(definition(at_end="promote"))
    drive(experiments, Law(1, (1.0, 0.7)), 300)
    assigned = next(one for one in map(experiments.assign, map(facts, range(100))) if one and one.arm == "ngram-8")
    experiments.observe_audit(assigned, diverged=True)
    await look(experiments)
    ended = experiments.book.experiments["lookup"]
    assert state(experiments) == ("stopped", None)
    assert "changed the output" in ended.ended_because


@pytest.mark.parametrize("is_promotion", [False, True])
async def test_the_last_requests_count_if_they_end_soon(is_promotion: bool) -> None:
    """What was in flight at the end counts within the grace and not after it; a divergence counts however late."""
    clock = Clock()
    experiments = front(MemoryExperimentStore(), clock)
    await experiments.create(definition())
    law = Law(1)
    in_flight = [(known, experiments.assign(known)) for known in map(law.facts, range(3))]
    key = experiments.book.experiments["lookup"].tally_key
    await (experiments.promote("lookup", "ngram-8") if is_promotion else experiments.stop("lookup"))
    counts = []
    for seconds, (known, assigned) in zip((1.0, managers.GRACE_SECONDS - 1.0, 1.0), in_flight, strict=True):
        clock.now += seconds
        assert assigned is not None
        experiments.observe(assigned, law.outcome(known, assigned.request.place.arm))
        experiments.observe_audit(assigned, diverged=True)
        await look(experiments)
        tally = await experiments._store.tally(key)
        counts.append([sum(tally.count(arm, what) for arm in (0, 1)) for what in ("finished", "diverged")])
    assert counts == [[1, 1], [2, 2], [2, 3]]


async def test_profiles_of_the_settings_are_there_and_yield_to_live_ones() -> None:
    """Profiles of the file are in the store after the start; what was changed or deleted live stays so."""
    store = MemoryExperimentStore()
    given = {"fast": NgramConfig(), "slow": NoSpeculation()}
    first = front(store, initial_profiles=given)
    assert dict(first.configs) == given
    await look(first)
    await first.put_profile("fast", NgramConfig(max_n=7))
    second = front(store, initial_profiles=given)
    await look(second)
    assert second.configs["fast"] == NgramConfig(max_n=7)
    await second.delete_profile("slow")
    await look(second)
    assert list(second.configs) == ["fast"]


async def test_a_profile_is_checked_like_a_request() -> None:
    """A method that is not served, a method's own name, and a bad name are refused."""
    experiments = front(MemoryExperimentStore())
    from speculation.messages import DraftModelConfig

    for name, config, wrong in (
        ("x", DraftModelConfig(), "draft_model"),
        ("ngram", NgramConfig(), "is a method"),
        ("a b", NgramConfig(), "letters"),
    ):
        with pytest.raises(ApiError, match=wrong):
            await experiments.put_profile(name, config)
    with pytest.raises(ApiError, match="draft_model"):
        await experiments.create(
            definition(
                arms=[
                    {"name": "a", "speculation": {"method": "none"}},
                    {"name": "b", "speculation": {"method": "draft_model"}},
                ]
            )
        )


async def test_a_filter_for_another_service_is_warned_of() -> None:
    """An experiment on an unknown model is created, with a warning that says what is served."""
    created = await front(MemoryExperimentStore()).create(definition(filter={"model": "gpt-9"}))
    assert len(created.warnings) == 1
    assert "filter.model 'gpt-9' matches nothing" in created.warnings[0]


async def test_of_two_creators_one_wins() -> None:
    """Two fronts that create experiments on the same traffic at once: one is told of the other."""
    store = MemoryExperimentStore()
    results = await asyncio.gather(
        *(front(store).create(definition(name=name)) for name in ("one", "two")), return_exceptions=True
    )
    assert sum(isinstance(result, ApiError) for result in results) == 1
    assert len((await front(store).refresh()).live) == 1


async def test_deleting_forgets_the_numbers() -> None:
    """A new experiment of the same name starts from nothing."""
    experiments = front(MemoryExperimentStore())
    await experiments.create(definition())
    drive(experiments, Law(1), 300)
    await experiments.stop("lookup")
    await experiments.delete("lookup")
    await experiments.create(definition())
    assert (await experiments.report("lookup")).num_samples == 0


async def test_the_trace_keeps_how_it_went() -> None:
    """Each look with news is a point: samples grow, and both estimates are there."""
    experiments = front(MemoryExperimentStore())
    await experiments.create(definition())
    for part in range(4):
        drive(experiments, Law(part), 60, first=60 * part)
        await look(experiments, experiments)
    points = (await experiments.trace("lookup")).points
    assert [point.num_samples for point in points] == [60, 120, 180, 240]
    assert points[-1].effects[0].adjusted != points[-1].effects[0].unadjusted


async def test_an_evaluator_without_the_lead_does_nothing() -> None:
    """While another front leads, this one leaves conclusions to it."""
    store = MemoryExperimentStore()
    experiments = front(store)
    await experiments.create(definition())
    drive(experiments, Law(1, (1.0, 0.7)), 1500)
    await store.lead("somebody", 60.0)
    await look(experiments)
    assert experiments.book.experiments["lookup"].status == "running"


async def test_an_away_store_does_not_end_the_evaluator() -> None:
    """Its absence is the caller's to note."""

    class Away(MemoryExperimentStore):
        async def lead(self, front: str, seconds: float) -> bool:
            raise StoreUnavailable("gone")

    experiments = front(Away())
    await experiments.create(definition())
    await experiments._evaluate()

    async def unused(_: object) -> None:
        raise AssertionError

    with pytest.raises(StoreUnavailable):
        await Evaluator(Away(), unused, Clock()).evaluate(experiments.book, "me")
