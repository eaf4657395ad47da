from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from service.experiments.assignment import place
from service.experiments.model import Promotion
from service.experiments.report import Comparison, Effect, Report
from service.experiments.tally import Outcome, Request, Tally, record
from service.experiments.verdict import conclude, report_on
from tests.service.experiments.traffic import DRAFT, NGRAM, PLAIN, Law, definition, experiment, facts, observe, replaced

RAILS = [
    {"metric": "ttft", "max_worsening": 0.1},
    {"metric": "tokens_per_second", "limit": 1.0},
    {"metric": "error_rate", "max_worsening": 0.1},
]
KINDS: list[dict[str, Any]] = [{}, {"unit": "user"}, {"allocation": "adaptive"}, {"allocation": "switchback"}]


def reported(num: int, effects: tuple[float, ...] = (1.0, 1.0), seed: int = 1, **changes: Any) -> Report:
    chosen = experiment(**changes)
    return report_on(chosen, observe(chosen, Law(seed, effects), num))


def effect(low: float, value: float, high: float) -> Effect:
    return Effect(speedup=value, low=low, high=high)


def compared(*effects: tuple[str, str, Effect]) -> list[Comparison]:
    return [
        Comparison(arm=arm, against=against, effect=one, adjusted=one, unadjusted=one, samples_saved=None)
        for arm, against, one in effects
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_faster_arm_wins(kind: dict[str, Any]) -> None:
    """25 % less time per token is found under every allocation, with an interval that holds the truth."""
    report = reported(3000, (1.0, 0.75), **kind)
    one = report.comparisons[0].effect
    assert (report.decision, report.best, report.is_safe_to_promote) == ("winner", "ngram-8", True)
    assert one.low is not None
    assert one.high is not None
    assert one.low < 1 / 0.75 - 1 < one.high
    assert f"n = {report.num_samples:,}" in report.verdict
    assert report.verdict.endswith("safe to promote")


@pytest.mark.parametrize("kind", KINDS)
def test_equal_arms_have_no_winner(kind: dict[str, Any]) -> None:
    """Nothing is concluded where there is nothing, and at the end that is said."""
    report = reported(1500, **kind)
    assert (report.decision, report.best, report.is_conclusive) == ("undecided", None, False)
    ended = reported(1500, max_samples=1000, **kind)
    assert (ended.decision, ended.is_conclusive, ended.is_safe_to_promote) == ("no_difference", True, False)


def test_a_slower_arm_loses() -> None:
    """Where the first arm is faster, the verdict keeps it."""
    report = reported(2000, (1.0, 1.5))
    assert (report.decision, report.best, report.is_safe_to_promote) == ("keep", "plain", False)
    assert "keep plain" in report.verdict


@pytest.mark.parametrize("metric", ["tpot", "latency_per_token", "ttft", "tokens_per_second"])
def test_every_metric_says_faster_for_faster(metric: str) -> None:
    """Less time or more tokens a second: the arm that is better is ahead, and levels are in the metric's unit."""
    chosen = experiment(metric=metric)
    law = Law(2)
    tally = Tally()
    for number in range(1500):
        known = law.facts(number)
        found = place(chosen, known)
        assert found is not None
        outcome = law.outcome(known, 0)
        if found.arm == 1:
            outcome = msgspec.structs.replace(
                outcome, ttft_seconds=0.6 * outcome.ttft_seconds, latency_seconds=0.6 * outcome.latency_seconds
            )
        record(
            tally, chosen.definition, Request(found, [0.5, 0.5], known.num_prompt_tokens, known.queue_depth), outcome
        )
    report = report_on(chosen, tally)
    assert report.best == "ngram-8"
    levels = [arm.level for arm in report.arms]
    assert levels[0] is not None
    assert levels[1] is not None
    assert (levels[1] > levels[0]) is (metric == "tokens_per_second")


def test_adjustment_reports_both_and_saves_samples() -> None:
    """Both estimates are there; the adjusted interval is narrower, and the report says by how much."""
    one = reported(3000, (1.0, 0.9)).comparisons[0]
    assert one.adjusted.high is not None
    assert one.unadjusted.high is not None
    assert one.adjusted.low is not None
    assert one.unadjusted.low is not None
    assert one.adjusted.high - one.adjusted.low < one.unadjusted.high - one.unadjusted.low
    assert one.samples_saved is not None
    assert one.samples_saved > 0.1
    assert one.effect == one.adjusted
    assert reported(3000, (1.0, 0.9), adjust=False).comparisons[0].effect == one.unadjusted


def test_below_the_minimum_nothing_is_said() -> None:
    """However large the difference, fewer requests than asked for conclude nothing."""
    report = reported(150, (1.0, 0.2))
    assert (report.decision, report.is_conclusive) == ("collecting", False)
    assert "150 of at least 200" in report.verdict
    assert reported(0).decision == "collecting"


def test_a_winner_beats_every_other_arm() -> None:
    """Of three arms, one that is faster than the first and not than the second is no winner before the end."""
    three = definition(arms=[PLAIN, NGRAM, DRAFT])
    close = compared(
        ("ngram-8", "plain", effect(0.1, 0.2, 0.3)),
        ("draft", "plain", effect(0.12, 0.22, 0.32)),
        ("draft", "ngram-8", effect(-0.05, 0.02, 0.1)),
    )
    running = conclude(three, 1000, close, [], None)
    assert (running.decision, running.best, running.is_final) == ("undecided", None, False)
    ended = conclude(three, 20_000, close, [], None)
    assert (ended.decision, ended.best, ended.is_safe) == ("better", "draft", True)
    assert "whether it is faster than ngram-8 is not established" in ended.words
    clear = [*close[:2], *compared(("draft", "ngram-8", effect(0.01, 0.05, 0.1)))]
    assert conclude(three, 1000, clear, [], None)[:2] == ("winner", "draft")


@pytest.mark.parametrize(
    ("found", "decision"),
    [
        (effect(0.001, 0.1, 0.2), "winner"),
        (effect(0.0, 0.1, 0.2), "undecided"),
        (effect(-0.001, 0.1, 0.2), "undecided"),
        (effect(-0.2, -0.1, 0.0), "undecided"),
        (effect(-0.2, -0.1, -0.001), "keep"),
        (Effect(speedup=0.5, low=None, high=None), "undecided"),
        (Effect(speedup=None, low=None, high=None), "undecided"),
    ],
)
def test_no_conclusion_crosses_its_interval(found: Effect, decision: str) -> None:
    """An arm is named only if zero lies outside the interval."""
    assert conclude(definition(), 1000, compared(("ngram-8", "plain", found)), [], None).decision == decision


def test_the_words_are_plain() -> None:
    """The sentence has arm, size, metric, interval and n as a person would say them."""
    words = conclude(definition(), 1240, compared(("ngram-8", "plain", effect(0.17, 0.21, 0.25))), [], None).words
    assert words == ("ngram-8 is 21 % faster per token than plain, 95 % interval 17 to 25, n = 1,240; safe to promote")


def test_an_arm_that_breaks_a_guardrail_is_not_promoted() -> None:
    """An arm with faster tokens and twice the time to the first one ends the experiment, with the reason."""
    rail = [{"metric": "ttft", "limit": 0.2}]
    report = reported(2000, (1.0, 0.5), guardrails=rail)
    assert (report.decision, report.is_conclusive, report.is_safe_to_promote) == ("broken", True, False)
    assert "p95 of ttft is at most 0.2 s" in report.verdict
    assert report.guardrails[0].state == "breaks"


def test_an_open_guardrail_delays_promotion() -> None:
    """A winner whose p95 may still lie above the limit goes on, and the verdict says what is open."""
    report = reported(400, (1.0, 0.5), guardrails=[{"metric": "error_rate", "limit": 0.005}])
    assert (report.decision, report.is_conclusive, report.is_safe_to_promote) == ("winner", False, False)
    assert "not yet safe to promote" in report.verdict


@pytest.mark.parametrize(
    ("rail", "state"),
    [
        ({"metric": "ttft", "limit": 30.0}, "holds"),
        ({"metric": "tokens_per_second", "limit": 1.0}, "holds"),
        ({"metric": "tokens_per_second", "limit": 500.0}, "breaks"),
        ({"metric": "tpot", "max_worsening": 0.5}, "holds"),
        ({"metric": "tpot", "max_worsening": 0.001}, "undecided"),
        ({"metric": "error_rate", "limit": 0.05}, "holds"),
        ({"metric": "error_rate", "max_worsening": 0.05}, "holds"),
        ({"metric": "error_rate", "max_worsening": 0.001}, "undecided"),
    ],
)
def test_a_guardrail_is_judged_by_its_interval(rail: dict[str, Any], state: str) -> None:
    """Holds and breaks are said of what the whole interval lies beyond; between them it is undecided."""
    found = reported(3000, guardrails=[rail]).guardrails[0]
    assert found.state == state
    if found.low is not None and found.high is not None and found.value is not None:
        assert found.low <= found.value <= found.high


def test_errors_are_a_guardrail() -> None:
    """An arm of which a fifth of the requests fail breaks a limit of 5 %."""
    chosen = experiment(guardrails=[{"metric": "error_rate", "limit": 0.05}])
    tally = observe(chosen, Law(5), 500)
    for number in range(500, 700):
        known = facts(number)
        found = place(chosen, known)
        if found is not None and found.arm == 1:
            record(tally, chosen.definition, Request(found, [0.5, 0.5], 10, 0.0), Outcome(status="failed"))
    assert report_on(chosen, tally).decision == "broken"


def test_a_changed_output_is_a_broken_promise() -> None:
    """One diverged audit ends the experiment, whatever the times say."""
    chosen = experiment()
    tally = observe(chosen, Law(6, (1.0, 0.5)), 1000)
    tally.add("n.1.audited", 40.0)
    assert report_on(chosen, tally).decision == "winner"
    tally.add("n.1.diverged", 1.0)
    report = report_on(chosen, tally)
    assert report.decision == "broken"
    assert "changed the output of 1 of 40 audited requests" in report.verdict


@pytest.mark.parametrize("unit", ["request", "user"])
def test_lost_requests_make_an_experiment_worthless(unit: str) -> None:
    """An arm that loses every fourth of its units is not compared: the split gives it away."""
    chosen = experiment(unit=unit)
    law, tally = Law(7, (1.0, 0.5), num_users=4000), Tally()
    for number in range(6000):
        known = law.facts(number)
        found = place(chosen, known)
        assert found is not None
        if found.arm == 0 or found.unit % 4:
            request = Request(found, [0.5, 0.5], known.num_prompt_tokens, known.queue_depth)
            record(tally, chosen.definition, request, law.outcome(known, found.arm))
    report = report_on(chosen, tally)
    assert report.decision == "invalid"
    assert report.sample_ratio is not None
    assert report.sample_ratio.is_mismatch
    assert "Do not trust" in report.verdict


def test_a_busy_arm_is_no_mismatch_for_sticky_units() -> None:
    """Users who send twice as much where answers come sooner are as many as before."""
    chosen = experiment(unit="user")
    law, tally = Law(8, num_users=500), Tally()
    for number in range(4000):
        known = law.facts(number)
        found = place(chosen, known)
        assert found is not None
        for _ in range(1 + found.arm):
            request = Request(found, [0.5, 0.5], known.num_prompt_tokens, known.queue_depth)
            record(tally, chosen.definition, request, law.outcome(known, found.arm))
    report = report_on(chosen, tally)
    assert report.sample_ratio is not None
    assert not report.sample_ratio.is_mismatch


def test_switchback_has_no_split_to_check() -> None:
    """Slots are dealt out, not drawn; the report names the allocation."""
    report = reported(500, allocation="switchback")
    assert report.sample_ratio is None
    assert report.allocation == "switchback"


def test_traffic_that_never_matches_is_warned_of() -> None:
    """A filter that took none of 500 requests, or a unit that none of them had, is named in the report."""
    chosen = experiment(unit="header:X-Nobody")
    assert report_on(chosen, Tally(sums={"c.considered": 500.0})).warnings == [
        "filter matches none of the 500 requests so far"
    ]
    without_unit = Tally(sums={"c.considered": 500.0, "c.matched": 300.0})
    assert "unit header:X-Nobody" in report_on(chosen, without_unit).warnings[0]


def test_a_cool_down_compares_the_promoted_arm_with_the_first() -> None:
    """During it only these two count, and a promoted arm that turned slow is seen."""
    promotion = Promotion(arm=2, profile="x", previous=None, at=0.0, until=9e9, by_hand=False, holdback=0.3)
    chosen = replaced(experiment(arms=[PLAIN, NGRAM, DRAFT]), status="promoted", promotion=promotion)
    report = report_on(chosen, observe(chosen, Law(9, (1.0, 1.0, 1.6)), 1500))
    assert (report.phase, [arm.name for arm in report.arms]) == ("cool-down", ["plain", "draft"])
    assert report.decision == "keep"


def test_a_report_is_plain_json() -> None:
    """Nothing in a report is infinite or of a type that JSON lacks, also when there is no data."""
    for num in (0, 3, 300):
        report = reported(
            num, guardrails=[{"metric": "ttft", "max_worsening": 0.1}, {"metric": "error_rate", "limit": 0.1}]
        )
        assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report
        assert all(math.isfinite(arm.level) for arm in report.arms if arm.level is not None)


def alike(per_arm: tuple[int, int], outcome: Outcome, **changes: Any) -> Report:
    """A report on that many requests an arm, all with the same outcome and each of a user of its own."""
    chosen, tally, left = experiment(guardrails=RAILS, **changes), Tally(), list(per_arm)
    for number in range(2000):
        if not any(left):
            break
        known = facts(number, user=f"user-{number}")
        found = place(chosen, known)
        if found is not None and left[found.arm] > 0:
            left[found.arm] -= 1
            record(tally, chosen.definition, Request(found, [0.5, 0.5], 100, 0.0), outcome)
    return report_on(chosen, tally)


def finished(ttft: float, latency: float, num_tokens: int = 7) -> Outcome:
    return Outcome(status="finished", num_output_tokens=num_tokens, ttft_seconds=ttft, latency_seconds=latency)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "outcome",
    [
        finished(0.1, 0.3 + 0.1 / 3.0),
        finished(0.0, 0.0),
        finished(0.2, 0.1),
        finished(0.1, 0.1, num_tokens=1),
        finished(0.1, 1.0, num_tokens=2**62),
        finished(0.1, 1e200),
        finished(math.inf, math.inf),
        finished(math.nan, math.nan),
        finished(0.0, 5e-324),
        Outcome(status="failed"),
    ],
    ids=["equal", "zero", "backwards", "one token", "many tokens", "endless", "inf", "nan", "tiny", "failed"],
)
def test_odd_requests_leave_a_report_of_numbers(kind: dict[str, Any], outcome: Outcome) -> None:
    """With 0, 1 or many requests an arm, all with the same odd times, a report is plain numbers and names no winner."""
    for per_arm in ((0, 0), (0, 1), (1, 1), (2, 1), (1, 60), (120, 120)):
        report = alike(per_arm, outcome, **kind)
        assert report.decision in {"collecting", "undecided", "broken", "invalid"}, per_arm
        assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report


def test_an_endless_time_does_not_spoil_the_others() -> None:
    """One time that is no number is left out, and what 1,000 other requests show stays the same."""
    chosen = experiment()
    tally = observe(chosen, Law(10, (1.0, 0.7)), 1000)
    before = report_on(chosen, tally).comparisons
    for seconds in (math.inf, math.nan, 1e300):
        known = facts(5000)
        found = place(chosen, known)
        assert found is not None
        record(tally, chosen.definition, Request(found, [0.5, 0.5], 100, 0.0), finished(0.1, seconds))
    assert report_on(chosen, tally).comparisons == before


DAMAGED = [
    *(
        (name, value)
        for name in (
            "m.0.1.1",
            "s.1.2",
            "n.0.analysed",
            "n.1.finished",
            "n.1.diverged",
            "c.matched",
            "x.0",
            "v.1",
            "e.0.0",
        )
        for value in (math.inf, -math.inf, math.nan)
    ),
    ("n.0.analysed", -1.0),
    ("n.1.finished", 1e300),
    ("v.1", -1e9),
]


@pytest.mark.parametrize(("name", "value"), DAMAGED)
def test_sums_that_are_no_numbers_are_not_known(name: str, value: float) -> None:
    """A stored sum that is no number, or an impossible count, leaves the comparison out, and the report says so."""
    chosen = experiment(guardrails=[{"metric": "error_rate", "limit": 0.5}])
    tally = observe(chosen, Law(11), 300)
    assert report_on(chosen, tally).comparisons
    tally.sums |= {"n.1.audited": 5.0, name: value}
    report = report_on(chosen, tally)
    assert (report.comparisons, report.decision, report.sample_ratio) == ([], "collecting", None)
    assert [(rule.metric, rule.state) for rule in report.guardrails] == [("audit", "undecided")]
    assert report.warnings == [f"stored sums are damaged ({name}): nothing is compared"]
    assert b"NaN" not in msgspec.json.encode(report)


def test_a_divergence_counts_beside_damaged_sums() -> None:
    """An audited request with other tokens ends the experiment, whatever else is stored."""
    chosen = experiment()
    tally = observe(chosen, Law(11), 300)
    tally.sums |= {"n.1.audited": 5.0, "n.1.diverged": 1.0, "n.0.finished": math.nan}
    assert report_on(chosen, tally).decision == "broken"


def test_no_difference_has_no_sign() -> None:
    """A difference that rounds to nothing reads 0.0, not -0.0."""
    words = conclude(definition(), 900, compared(("ngram-8", "plain", effect(-1e-9, -0.0, 1e-9))), [], None).words
    assert "-0.0" not in words
