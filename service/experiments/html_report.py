"""A report as one HTML file: nothing outside it is loaded, nothing in it runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from service.experiments.report import ArmReport, Comparison, Effect, GuardrailReport, Report
from service.experiments.trace import Point, Trace, TracedEffect

WIDTH, HEIGHT = 720, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 32

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --line: #c9d1d9; --one: #0b63c5; --two: #8a5a00; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --paper: #0d1117; --line: #3d444d; --one: #6cb2ff; --two: #e0a84f; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .5rem 0; }
th, td { text-align: left; padding: .35rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
.verdict { font-size: 1.2rem; border-left: .3rem solid var(--one); padding: .5rem 1rem; }
svg { width: 100%; height: auto; }
svg text { fill: var(--ink); font-size: 12px; }
.axis { stroke: var(--line); } .zero { stroke: var(--ink); stroke-dasharray: 3 3; }
.band { fill: var(--one); fill-opacity: .18; } .curve { fill: none; stroke: var(--one); stroke-width: 2; }
.plain { fill: none; stroke: var(--two); stroke-width: 1; stroke-dasharray: 5 3; }
"""


class Axis(NamedTuple):
    """Maps values to pixels."""

    low: float
    high: float
    from_pixel: float
    to_pixel: float

    def at(self, value: float) -> float:
        span = self.high - self.low or 1.0
        inside = min(max(value, self.low), self.high)
        return round(self.from_pixel + (inside - self.low) / span * (self.to_pixel - self.from_pixel), 2)


def render(report: Report, trace: Trace) -> str:
    """The whole file."""
    facts = (
        f"Metric {report.metric}, unit {report.unit}, allocation {report.allocation}, {report.status}; "
        f"{report.num_samples:,} requests of at least {report.min_samples:,} and at most {report.max_samples:,}; "
        f"intervals hold at every look with probability {100.0 * (1.0 - report.significance):g} %."
    )
    parts = [
        f"<h1>{escape(report.name)}</h1>",
        f"<p>{escape(report.hypothesis)}</p>" if report.hypothesis else "",
        f'<p class="verdict" role="status">{escape(report.verdict)}.</p>',
        f"<p>{escape(facts)}</p>",
        *(f"<p>Warning: {escape(warning)}.</p>" for warning in report.warnings),
        _comparison_table(report.comparisons),
        *(_plot(one, trace.points) for one in report.comparisons),
        _arm_table(report.arms),
        _guardrail_table(report.guardrails) if report.guardrails else "",
        _split(report),
    ]
    title = escape(f"{report.name}: experiment report")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>'
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100.0 * value:+.1f} %"


def interval(effect: Effect) -> str:
    """An effect and its interval."""
    if effect.low is None or effect.high is None:
        return f"{percent(effect.speedup)} (not bounded yet)"
    return f"{percent(effect.speedup)} ({percent(effect.low)} to {percent(effect.high)})"


def _comparison_table(comparisons: Sequence[Comparison]) -> str:
    rows = [
        (
            f"{one.arm} against {one.against}",
            interval(one.adjusted),
            interval(one.unadjusted),
            "–" if one.samples_saved is None else f"{100.0 * one.samples_saved:.0f} %",
        )
        for one in comparisons
    ]
    head = ("Arms", "Faster by, adjusted", "Faster by, as it came", "Samples saved by covariates")
    return _table("Differences", head, rows)


def _arm_table(arms: Sequence[ArmReport]) -> str:
    rows = []
    for arm in arms:
        tails = "; ".join(f"{one.metric} {_number(one.p50)} / {_number(one.p95)}" for one in arm.quantiles)
        requests = f"{arm.analysed:,} counted, {arm.failed:,} failed, {arm.aborted:,} aborted"
        config = " ".join(f"{key}={value}" for key, value in arm.speculation.items())
        rows.append((arm.name, config, f"{100.0 * arm.weight:.0f} %", requests, _number(arm.level), tails))
    return _table("Arms", ("Arm", "Config", "Share", "Requests", "Level", "p50 / p95"), rows)


def _guardrail_table(guardrails: Sequence[GuardrailReport]) -> str:
    rows = [
        (one.arm, one.rule, one.state, f"{_number(one.value)} ({_number(one.low)} to {_number(one.high)}) {one.unit}")
        for one in guardrails
    ]
    return _table("Guardrails", ("Arm", "Rule", "State", "Now"), rows)


def _split(report: Report) -> str:
    split = report.sample_ratio
    if split is None:
        return "<p>The split of the traffic is by time slots; there is nothing to check.</p>"
    seen = " / ".join(f"{count:,.0f}" for count in split.observed)
    due = " / ".join(f"{count:,.0f}" for count in split.expected)
    found = "does not match" if split.is_mismatch else "matches"
    return f"<p>The split of the traffic, {seen}, {found} what was asked for, {due} (p = {split.p_value:.2g}).</p>"


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    titles = "".join(f'<th scope="col">{escape(title)}</th>' for title in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><caption>{escape(caption)}</caption><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"


def _plot(comparison: Comparison, points: Sequence[Point]) -> str:
    """How one difference and its interval went over the samples."""
    looks = [
        (point.num_samples, effect)
        for point in points
        for effect in point.effects
        if (effect.arm, effect.against) == (comparison.arm, comparison.against) and _is_bounded(effect)
    ]
    if len(looks) < 2:
        return ""
    ends = [abs(end) for _, one in looks[len(looks) // 4 :] for end in (one.adjusted.low, one.adjusted.high) if end]
    reach = max([*ends, 0.05])
    x = Axis(looks[0][0], looks[-1][0], LEFT, WIDTH - RIGHT)
    y = Axis(-reach, reach, HEIGHT - BOTTOM, TOP)

    def line(values: Iterable[float | None]) -> list[str]:
        numbers = [number for number, _ in looks]
        return [
            f"{x.at(number)},{y.at(value)}" for number, value in zip(numbers, values, strict=True) if value is not None
        ]

    upper = line(one.adjusted.high for _, one in looks)
    lower = line(one.adjusted.low for _, one in looks)
    middle = line(one.adjusted.speedup for _, one in looks)
    ticks = "".join(
        f'<text x="{LEFT - 6}" y="{y.at(value) + 4}" text-anchor="end">{100.0 * value:+.0f} %</text>'
        for value in (-reach, 0.0, reach)
    )
    label = escape(f"{comparison.arm} against {comparison.against}: {interval(comparison.adjusted)}")
    bounds = "".join(f'<polyline class="plain" points="{" ".join(line(side))}"/>' for side in _plain_sides(looks))
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        f'<polygon class="band" points="{" ".join([*upper, *reversed(lower)])}"/>{bounds}'
        f'<polyline class="curve" points="{" ".join(middle)}"/>'
        f'<line class="zero" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y.at(0.0)}" y2="{y.at(0.0)}"/>'
        f'<line class="axis" x1="{LEFT}" x2="{LEFT}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>{ticks}'
        f'<text x="{LEFT}" y="{HEIGHT - 10}">{looks[0][0]:,} requests</text>'
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 10}" text-anchor="end">{looks[-1][0]:,}</text></svg>'
        f"<figcaption>{label}. Band: interval at every look; dashed: without covariates.</figcaption></figure>"
    )


def _plain_sides(looks: Sequence[tuple[int, TracedEffect]]) -> tuple[list[float | None], list[float | None]]:
    return [one.unadjusted.low for _, one in looks], [one.unadjusted.high for _, one in looks]


def _is_bounded(effect: TracedEffect) -> bool:
    return effect.adjusted.low is not None and effect.adjusted.high is not None


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
