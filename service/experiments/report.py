"""What is told about an experiment: plain data, the same for the page, the command line and the HTML file."""

from __future__ import annotations

from typing import Literal

import msgspec

Decision = Literal["collecting", "undecided", "winner", "better", "keep", "no_difference", "broken", "invalid"]
"""Too few requests; nothing established yet; one arm is faster than all others; one is faster than the first arm, while
which of several is the fastest stays open; the first arm is the fastest; nothing established at the end; a guardrail
broke; the data cannot be trusted."""


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """How much faster one arm is than another: 0.21 is 21 % more speed. None where nothing bounds it."""

    speedup: float | None
    low: float | None
    high: float | None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One arm against another, with intervals that hold for all pairs of arms and at every look together."""

    arm: str
    against: str
    effect: Effect
    """What conclusions rest on."""
    adjusted: Effect
    unadjusted: Effect
    samples_saved: float | None
    """Share of the samples that adjustment makes unnecessary: 1 less the ratio of the variances."""


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """Of one metric in one arm, in its own unit, with the interval of the 95th percentile on the slow side."""

    metric: str
    p50: float | None
    p95: float | None
    low: float | None
    high: float | None


class ArmReport(msgspec.Struct, frozen=True, kw_only=True):
    """One arm's counts and levels."""

    name: str
    weight: float
    speculation: dict[str, object]
    profile: str | None
    profile_version: int | None
    analysed: int
    finished: int
    failed: int
    aborted: int
    audited: int
    diverged: int
    level: float | None
    """The primary metric, adjusted if the experiment adjusts."""
    unadjusted_level: float | None
    quantiles: list[Quantiles]


class GuardrailReport(msgspec.Struct, frozen=True, kw_only=True):
    """One guardrail for one arm."""

    arm: str
    metric: str
    rule: str
    """In words."""
    state: Literal["holds", "undecided", "breaks"]
    value: float | None
    low: float | None
    high: float | None
    limit: float | None
    unit: str


class SampleRatio(msgspec.Struct, frozen=True, kw_only=True):
    """Whether arms got what they were to get."""

    expected: list[float]
    observed: list[float]
    p_value: float
    """Valid at every look."""
    is_mismatch: bool


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """An experiment's state at one look."""

    name: str
    hypothesis: str
    status: str
    phase: Literal["experiment", "cool-down"]
    metric: str
    unit: str
    allocation: str
    significance: float
    num_samples: int
    min_samples: int
    max_samples: int
    decision: Decision
    best: str | None
    """The arm that the decision is about, where it names one."""
    is_safe_to_promote: bool
    is_conclusive: bool
    """Nothing is gained by going on."""
    verdict: str
    arms: list[ArmReport]
    comparisons: list[Comparison]
    guardrails: list[GuardrailReport]
    sample_ratio: SampleRatio | None
    """None where time slots are assigned, and nothing falls to arms by chance."""
    warnings: list[str]
