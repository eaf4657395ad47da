"""From an experiment and its tally to numbers: pairs of arms, guardrails, and the sample-ratio check."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np

from service.experiments.assignment import traffic_weights
from service.experiments.model import Definition, Experiment, Guardrail, Metric, Switchback
from service.experiments.report import Comparison, Effect, GuardrailReport, Quantiles, SampleRatio
from service.experiments.sheet import Sheet
from service.experiments.statistics import ratio
from service.experiments.statistics.quantile import Quantile, proportion, quantile
from service.experiments.statistics.sequence import Interval, half_width, share_evidence
from service.experiments.statistics.units import units_by_arm
from service.experiments.tally import guarded_metrics

MISMATCH = 0.001
"""Below this p the split of the traffic is not what was asked for."""
UNITS = {"tpot": "s", "latency_per_token": "s", "ttft": "s", "tokens_per_second": "tokens/s", "error_rate": ""}

State = Literal["holds", "undecided", "breaks"]


class Levels(NamedTuple):
    """Both estimates of all arms, in the order of `arms`."""

    arms: list[int]
    unadjusted: ratio.Levels
    adjusted: ratio.Levels


def levels_of(sheet: Sheet, arms: list[int]) -> Levels | None:
    """None while an arm has nothing, or where the sums that were read are not numbers."""
    if sheet.damaged:
        return None
    with np.errstate(all="ignore"):
        moments = sheet.moments()
    moments = ratio.Moments(moments.sums[arms], moments.second[arms][:, :, arms])
    if (moments.sums[:, (ratio.COUNT, ratio.TIME, ratio.SIZE)] <= 0.0).any():
        return None
    if not (np.isfinite(moments.sums).all() and np.isfinite(moments.second).all()):
        return None
    # A slot's arm makes the queue that its requests meet, so the load is no covariate there.
    is_switchback = isinstance(sheet.definition.allocation, Switchback)
    covariates = ratio.LENGTHS if is_switchback else ratio.COVARIATES
    with np.errstate(all="ignore"):
        return Levels(arms, ratio.unadjusted(moments), ratio.adjusted(moments, covariates, is_paired=is_switchback))


def compare(definition: Definition, levels: Levels) -> list[Comparison]:
    """All pairs, each arm against those before it. The significance is shared by all pairs [Bonferroni]."""
    num_arms = len(levels.arms)
    pairs = [(arm, against) for against in range(num_arms) for arm in range(against + 1, num_arms)]
    alpha = definition.significance / len(pairs)
    scale = math.log1p(definition.expected_effect)
    names = [definition.arms[arm].name for arm in levels.arms]
    comparisons = []
    for arm, against in pairs:
        unadjusted, plain_error = _effect(levels.unadjusted, arm, against, alpha, scale)
        adjusted, error = _effect(levels.adjusted, arm, against, alpha, scale)
        saved = 1.0 - (error / plain_error) ** 2 if plain_error > 0.0 else math.nan
        comparisons.append(
            Comparison(
                arm=names[arm],
                against=names[against],
                effect=adjusted if definition.adjust else unadjusted,
                adjusted=adjusted,
                unadjusted=unadjusted,
                samples_saved=finite(saved),
            )
        )
    return comparisons


def in_own_unit(metric: str, seconds: float) -> float:
    """A time over tokens as the metric is written: tokens per second are its reciprocal."""
    if metric != "tokens_per_second":
        return seconds
    return math.inf if seconds == 0.0 else 1.0 / seconds


def quantiles_of(sheet: Sheet, arm: int) -> list[Quantiles]:
    """Of each metric that is kept, one arm's."""
    definition, size = sheet.definition, sheet.size(arm)
    found = []
    for metric in guarded_metrics(definition):
        counts = sheet.bins(metric)[arm]
        half = quantile(counts, 0.5, alpha=definition.significance, size=size)
        tail = quantile(counts, 0.95, alpha=definition.significance, size=size)
        low, high = _ordered(metric, tail.interval)
        p50, p95 = in_own_unit(metric, half.value), in_own_unit(metric, tail.value)
        found.append(Quantiles(metric=metric, p50=finite(p50), p95=finite(p95), low=finite(low), high=finite(high)))
    return found


def guardrails_of(sheet: Sheet, arms: list[int]) -> list[GuardrailReport]:
    """Every guardrail for every arm but the first, and the exactness audit for all; that alone if sums are damaged."""
    definition = sheet.definition
    reports = []
    for guardrail in () if sheet.damaged else definition.guardrails:
        alpha = definition.significance / (len(definition.guardrails) * (len(arms) - 1))
        for arm in arms[1:]:
            if guardrail.limit is not None:
                reports.append(_absolute(sheet, guardrail, arm, alpha))
            if guardrail.max_worsening is not None:
                reports.append(_relative(sheet, guardrail, arm, arms[0], alpha))
    reports += [_audit(sheet, arm) for arm in arms if sheet.count(arm, "audited")]
    return reports


def sample_ratio_of(experiment: Experiment, sheet: Sheet) -> SampleRatio | None:
    """Whether units fell to arms as they were to: what loses requests of one arm compares nothing."""
    definition = experiment.definition
    num_arms = len(definition.arms)
    if sheet.damaged or isinstance(definition.allocation, Switchback):
        return None
    if definition.is_clustered:
        observed = [float(count) for count in units_by_arm(sheet.units, num_arms)]
        weights = traffic_weights(experiment)
        expected = [sum(observed) * weight for weight in weights]
        variances = [sum(observed) * weight * (1.0 - weight) for weight in weights]
    else:
        observed = [float(sheet.count(arm, "analysed")) for arm in range(num_arms)]
        expected, variances = sheet.expected.tolist(), sheet.variance.tolist()
    evidence = [
        share_evidence(seen - due, variance, deviation=0.02)
        for seen, due, variance in zip(observed, expected, variances, strict=True)
    ]
    p_value = min(1.0, num_arms * min(evidence))
    return SampleRatio(expected=expected, observed=observed, p_value=p_value, is_mismatch=p_value < MISMATCH)


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _effect(levels: ratio.Levels, arm: int, against: int, alpha: float, scale: float) -> tuple[Effect, float]:
    """The speed of an arm against another's, and the standard error of the logarithm of their ratio."""
    with np.errstate(all="ignore"):
        estimate, error, freedom = (float(value) for value in ratio.difference(levels, arm, against))
    half = float(half_width(error, freedom, alpha=alpha, scale=scale))
    low, high = math.exp(min(-estimate - half, 700.0)), math.exp(min(-estimate + half, 700.0))
    if not math.isfinite(estimate) or not math.isfinite(half):
        low, high = math.nan, math.nan
    speedup = finite(math.expm1(-estimate)) if math.isfinite(estimate) else None
    return Effect(speedup=speedup, low=finite(low - 1.0), high=finite(high - 1.0)), error


def _absolute(sheet: Sheet, guardrail: Guardrail, arm: int, alpha: float) -> GuardrailReport:
    assert guardrail.limit is not None
    metric = guardrail.metric
    found = _slow_tail(sheet, metric, arm, alpha)
    limit = in_own_unit(metric, guardrail.limit)
    low, high = _ordered(metric, found.interval)
    side = "at least" if metric == "tokens_per_second" else "at most"
    unit = UNITS[metric]
    return GuardrailReport(
        arm=sheet.definition.arms[arm].name,
        metric=metric,
        rule=f"{tail_name(metric)} is {side} {guardrail.limit:g} {unit}".rstrip(),
        state=_state(found.interval, limit),
        value=finite(in_own_unit(metric, found.value)),
        low=finite(low),
        high=finite(high),
        limit=guardrail.limit,
        unit=unit,
    )


def _relative(sheet: Sheet, guardrail: Guardrail, arm: int, control: int, alpha: float) -> GuardrailReport:
    """The worst that both intervals together allow: wider than need be, and right whatever the distributions."""
    assert guardrail.max_worsening is not None
    metric = guardrail.metric
    own = _slow_tail(sheet, metric, arm, alpha / 2.0)
    base = _slow_tail(sheet, metric, control, alpha / 2.0)
    if metric == "error_rate":
        value = own.value - base.value
        interval = Interval(own.interval.low - base.interval.high, own.interval.high - base.interval.low)
    else:
        value = own.value / base.value - 1.0
        high = own.interval.high / base.interval.low if base.interval.low > 0.0 else math.inf
        interval = Interval(own.interval.low / base.interval.high - 1.0, high - 1.0)
    how = (
        f"{guardrail.max_worsening:g} higher"
        if metric == "error_rate"
        else f"{100 * guardrail.max_worsening:g} % worse"
    )
    return GuardrailReport(
        arm=sheet.definition.arms[arm].name,
        metric=metric,
        rule=f"{tail_name(metric)} is at most {how} than {sheet.definition.arms[control].name}'s",
        state=_state(interval, guardrail.max_worsening),
        value=finite(value),
        low=finite(interval.low),
        high=finite(interval.high),
        limit=guardrail.max_worsening,
        unit="" if metric == "error_rate" else "relative",
    )


def _audit(sheet: Sheet, arm: int) -> GuardrailReport:
    diverged = sheet.count(arm, "diverged")
    return GuardrailReport(
        arm=sheet.definition.arms[arm].name,
        metric="audit",
        rule="no audited request gives other tokens than plain decoding",
        state="breaks" if diverged else "undecided" if sheet.damaged else "holds",
        value=diverged,
        low=diverged,
        high=diverged,
        limit=0.0,
        unit=f"of {sheet.count(arm, 'audited')}",
    )


def tail_name(metric: str) -> str:
    if metric == "error_rate":
        return "error_rate"
    return f"{'p5' if metric == 'tokens_per_second' else 'p95'} of {metric}"


def _slow_tail(sheet: Sheet, metric: Metric | Literal["error_rate"], arm: int, alpha: float) -> Quantile:
    """The 95th percentile of time, or the share of failed requests."""
    size = sheet.size(arm)
    if metric == "error_rate":
        return proportion(sheet.failed[arm], sheet.served[arm], alpha=alpha, size=size)
    return quantile(sheet.bins(metric)[arm], 0.95, alpha=alpha, size=size)


def _state(interval: Interval, limit: float) -> State:
    if interval.low > limit:
        return "breaks"
    return "holds" if interval.high <= limit else "undecided"


def _ordered(metric: str, interval: Interval) -> Interval:
    """An interval of times in the metric's own unit."""
    ends = (in_own_unit(metric, interval.low), in_own_unit(metric, interval.high))
    return Interval(min(ends), max(ends))
