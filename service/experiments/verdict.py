"""From numbers to a conclusion in plain words, never one that the intervals do not support."""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from service.experiments.assignment import traffic_weights
from service.experiments.evaluation import (
    Levels,
    compare,
    finite,
    guardrails_of,
    in_own_unit,
    levels_of,
    quantiles_of,
    sample_ratio_of,
)
from service.experiments.model import Definition, Experiment
from service.experiments.report import (
    ArmReport,
    Comparison,
    Decision,
    Effect,
    GuardrailReport,
    Report,
    SampleRatio,
)
from service.experiments.sheet import Sheet
from service.experiments.statistics import ratio
from service.experiments.tally import Tally

_FASTER = {
    "tpot": "faster per token",
    "latency_per_token": "faster per token, end to end,",
    "ttft": "faster to the first token",
    "tokens_per_second": "faster in tokens per second",
}


class Conclusion(NamedTuple):
    """What follows from the data so far."""

    decision: Decision
    best: str | None
    is_safe: bool
    is_final: bool
    words: str


def report_on(experiment: Experiment, tally: Tally) -> Report:
    """Everything there is to say about an experiment, or its cool-down, now."""
    definition = experiment.definition
    promotion = experiment.promotion
    is_watch = experiment.is_cooling_down
    arms = [*range(len(definition.arms))]
    if is_watch and promotion is not None:
        arms = sorted({0, promotion.arm})
    sheet = Sheet(tally, definition)
    num_samples = sum(sheet.count(arm, "analysed") for arm in arms)
    levels = levels_of(sheet, arms)
    comparisons = compare(definition, levels) if levels is not None else []
    guardrails = guardrails_of(sheet, arms)
    sample_ratio = sample_ratio_of(experiment, sheet)
    conclusion = conclude(definition, num_samples, comparisons, guardrails, sample_ratio)
    return Report(
        name=experiment.name,
        hypothesis=definition.hypothesis,
        status=experiment.status,
        phase="cool-down" if is_watch else "experiment",
        metric=definition.metric,
        unit=definition.unit,
        allocation=str(type(definition.allocation).__struct_config__.tag),
        significance=definition.significance,
        num_samples=num_samples,
        min_samples=definition.min_samples,
        max_samples=definition.max_samples,
        decision=conclusion.decision,
        best=conclusion.best,
        is_safe_to_promote=conclusion.is_safe,
        is_conclusive=conclusion.is_final,
        verdict=conclusion.words,
        arms=[_arm_report(experiment, sheet, levels, arm) for arm in arms],
        comparisons=comparisons,
        guardrails=guardrails,
        sample_ratio=sample_ratio,
        warnings=[*experiment.warnings, *_seen_warnings(sheet)],
    )


def _seen_warnings(sheet: Sheet) -> list[str]:
    """What the traffic shows to be a mistake in the definition, and what of the stored sums is damaged."""
    considered, matched, assigned = (sheet.seen(what) for what in ("considered", "matched", "assigned"))
    warnings = []
    if sheet.damaged:
        names = ", ".join(sheet.damaged[:3]) + (", …" if len(sheet.damaged) > 3 else "")
        warnings.append(f"stored sums are damaged ({names}): nothing is compared")
    if considered >= 100 and matched == 0:
        warnings.append(f"filter matches none of the {considered:,} requests so far")
    if matched >= 100 and assigned == 0:
        warnings.append(f"none of the {matched:,} requests that match has the unit {sheet.definition.unit}")
    return warnings


def conclude(
    definition: Definition,
    num_samples: int,
    comparisons: list[Comparison],
    guardrails: list[GuardrailReport],
    sample_ratio: SampleRatio | None,
) -> Conclusion:
    """In this order: can the data be trusted, does an arm do harm, is anything established, is it over."""
    if sample_ratio is not None and sample_ratio.is_mismatch:
        return Conclusion("invalid", None, False, True, _mismatch_words(definition, sample_ratio))
    broken = next((one for one in guardrails if one.state == "breaks"), None)
    if broken is not None:
        return Conclusion("broken", None, False, True, f"{_broken_words(broken, definition)}; not safe to promote")
    if num_samples < definition.min_samples or not comparisons:
        words = f"Collecting: {num_samples:,} of at least {definition.min_samples:,} requests"
        return Conclusion("collecting", None, False, False, words)
    return _ranked(definition, num_samples, comparisons, guardrails)


def _ranked(
    definition: Definition, num_samples: int, comparisons: list[Comparison], guardrails: list[GuardrailReport]
) -> Conclusion:
    """The conclusion from intervals that hold for all pairs together."""
    is_last = num_samples >= definition.max_samples
    control = definition.arms[0].name
    names = list(dict.fromkeys(name for one in comparisons for name in (one.against, one.arm)))
    beaten = {name: {other for other in names if other != name and _beats(comparisons, name, other)} for name in names}
    winner = next((name for name in names if len(beaten[name]) == len(names) - 1), None)
    if winner == control:
        others = [_sentence(definition, comparisons, control, name, num_samples) for name in names if name != control]
        return Conclusion("keep", control, False, True, f"{'; '.join(others)}; keep {control}")
    better = [name for name in names if control in beaten[name] and not any(name in beaten[one] for one in names)]
    if winner is None and not (is_last and better):
        return _open(definition, num_samples, comparisons, is_last)
    best = winner or max(better, key=lambda name: _of(comparisons, name, control).speedup or 0.0)
    words = _sentence(definition, comparisons, best, control, num_samples)
    if winner is None:
        rivals = ", ".join(name for name in names if name not in {best, control, *beaten[best]})
        words += f"; whether it is faster than {rivals} is not established"
    open_rules = [one for one in guardrails if one.arm == best and one.state != "holds"]
    decision: Decision = "winner" if winner else "better"
    if open_rules:
        words += f"; not yet safe to promote: whether {open_rules[0].rule} is not established"
        return Conclusion(decision, best, False, is_last, words)
    return Conclusion(decision, best, True, True, f"{words}; safe to promote")


def _open(definition: Definition, num_samples: int, comparisons: list[Comparison], is_last: bool) -> Conclusion:
    """Nothing is established, or not enough to name an arm."""
    control = definition.arms[0].name
    others = [one.arm for one in comparisons if one.against == control]
    found = "; ".join(_sentence(definition, comparisons, other, control, num_samples) for other in others)
    if is_last:
        words = f"No arm is shown to be faster than {control} after {num_samples:,} requests: {found}; keep {control}"
        return Conclusion("no_difference", None, False, True, words)
    return Conclusion("undecided", None, False, False, f"Which arm is the fastest is not established yet: {found}")


def _of(comparisons: list[Comparison], arm: str, against: str) -> Effect:
    """The effect of one arm against another, whichever way round it was computed."""
    for one in comparisons:
        if (one.arm, one.against) == (arm, against):
            return one.effect
        if (one.against, one.arm) == (arm, against):
            return Effect(
                speedup=_inverted(one.effect.speedup), low=_inverted(one.effect.high), high=_inverted(one.effect.low)
            )
    raise KeyError((arm, against))


def _inverted(speedup: float | None) -> float | None:
    """If a is this much faster than b, how much faster b is than a."""
    return None if speedup is None or speedup <= -1.0 else 1.0 / (1.0 + speedup) - 1.0


def _beats(comparisons: list[Comparison], arm: str, against: str) -> bool:
    low = _of(comparisons, arm, against).low
    return low is not None and low > 0.0


def _sentence(definition: Definition, comparisons: list[Comparison], arm: str, against: str, num_samples: int) -> str:
    """Such as: ngram-8 is 21 % faster per token than plain, 95 % interval 17 to 25, n = 1,240."""
    effect = _of(comparisons, arm, against)
    how = _FASTER[definition.metric]
    if effect.speedup is None:
        return f"the speed of {arm} against {against} is not known yet, n = {num_samples:,}"
    low, value, high = effect.low, effect.speedup, effect.high
    if value < 0.0:
        how = how.replace("faster", "slower")
        low, value, high = (None if high is None else -high, -value, None if low is None else -low)
    words = f"{arm} is {_percent(value)} % {how} than {against}".replace(",  than", ", than")
    confidence = f"{100.0 * (1.0 - definition.significance):g} % interval"
    ends = "not bounded yet" if low is None or high is None else f"{_percent(low)} to {_percent(high)}"
    return f"{words}, {confidence} {ends}, n = {num_samples:,}"


def _percent(share: float) -> str:
    """Whole per cents, with a decimal where that would hide something."""
    value = 100.0 * share
    return f"{value:.0f}" if abs(value) >= 9.95 else f"{round(value, 1) + 0.0:.1f}"


def _mismatch_words(definition: Definition, split: SampleRatio) -> str:
    parts = [
        f"{name} {seen:,.0f} instead of {due:,.0f}"
        for name, seen, due in zip(definition.arm_names, split.observed, split.expected, strict=True)
    ]
    what = "requests" if definition.unit == "request" else "units"
    return (
        f"Do not trust this experiment: its arms did not get the {what} they were assigned ({', '.join(parts)}; "
        f"p = {split.p_value:.1g}); something loses requests of one arm"
    )


def _broken_words(broken: GuardrailReport, definition: Definition) -> str:
    if broken.metric == "audit":
        return f"{broken.arm} changed the output of {broken.value:.0f} {broken.unit} audited requests"
    factor, unit = (100.0, " %") if broken.unit == "relative" else (1.0, f" {broken.unit}".rstrip())
    value = math.nan if broken.value is None else broken.value
    low = "-" if broken.low is None else f"{factor * broken.low:.3g}"
    high = "-" if broken.high is None else f"{factor * broken.high:.3g}"
    confidence = f"{100.0 * (1.0 - definition.significance):g} % interval"
    return (
        f"{broken.arm} breaks a guardrail ({broken.rule}): it is at {factor * value:.3g}{unit}, "
        f"{confidence} {low} to {high}"
    )


def _arm_report(experiment: Experiment, sheet: Sheet, levels: Levels | None, arm: int) -> ArmReport:
    definition = experiment.definition

    def level(estimates: ratio.Levels) -> float | None:
        assert levels is not None
        value = float(estimates.log_ratio[levels.arms.index(arm)])
        return finite(in_own_unit(definition.metric, math.exp(value))) if math.isfinite(value) else None

    unadjusted = None if levels is None else level(levels.unadjusted)
    return ArmReport(
        name=definition.arms[arm].name,
        weight=traffic_weights(experiment)[arm],
        speculation=msgspec.to_builtins(experiment.configs[arm]),
        profile=definition.arms[arm].profile,
        profile_version=experiment.versions[arm],
        analysed=sheet.count(arm, "analysed"),
        finished=sheet.count(arm, "finished"),
        failed=sheet.count(arm, "failed"),
        aborted=sheet.count(arm, "aborted"),
        audited=sheet.count(arm, "audited"),
        diverged=sheet.count(arm, "diverged"),
        level=level(levels.adjusted) if levels is not None and definition.adjust else unadjusted,
        unadjusted_level=unadjusted,
        quantiles=quantiles_of(sheet, arm),
    )
