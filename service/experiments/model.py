"""Profiles and experiments as users define them, and what the service keeps about each. Plain data."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec

from speculation.messages import SpeculationConfig

Text = Annotated[str, msgspec.Meta(max_length=2000)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=10_000_000)]

Metric = Literal["tpot", "latency_per_token", "ttft", "tokens_per_second"]
METRICS: tuple[Metric, ...] = get_args(Metric)
MAX_ARMS = 8


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """A named speculation config. Every change makes a new version."""

    name: str
    version: int
    speculation: SpeculationConfig
    updated_at: float
    """Seconds since the epoch."""


class Arm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One of the configs compared: a profile, as it is when the experiment starts, or a config of its own."""

    name: str
    profile: str | None = None
    speculation: SpeculationConfig | None = None
    weight: Annotated[float, msgspec.Meta(gt=0.0, lt=1.0)] | None = None
    """Share of the traffic; all arms have one, or none has and all are equal."""


class HeaderMatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests with this header."""

    name: Text
    value: Text


class Filter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which requests take part: those that satisfy all that is given."""

    model: Text | None = None
    route: Text | None = None
    """The path, such as /v1/chat/completions."""
    min_prompt_tokens: Tokens | None = None
    max_prompt_tokens: Tokens | None = None
    header: HeaderMatch | None = None


class Guardrail(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What no arm may do: the 95th percentile of a metric, on its slow side, or the share of requests that fail."""

    metric: Literal["tpot", "latency_per_token", "ttft", "tokens_per_second", "error_rate"]
    limit: Annotated[float, msgspec.Meta(gt=0.0, le=1e12)] | None = None
    """Seconds, seconds per token, tokens per second, or a share: an arm must stay on the good side of it."""
    max_worsening: Annotated[float, msgspec.Meta(gt=0.0, le=10.0)] | None = None
    """Against the first arm: 0.1 allows a p95 that is 10 % worse, or an error rate that is 0.1 higher."""


class Fixed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="fixed"):
    """Each unit to an arm by its hash, with the arms' weights."""


class Adaptive(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="adaptive"):
    """Weights follow the primary metric by Thompson sampling."""

    floor: Annotated[float, msgspec.Meta(ge=0.02, le=0.5)] = 0.1
    """No arm gets less."""


class Switchback(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="switchback"
):
    """All traffic to one arm for a time slot; every arm once in each block of slots, in random order."""

    slot_seconds: Annotated[float, msgspec.Meta(ge=1.0, le=86_400.0)] = 60.0
    washout_seconds: Annotated[float, msgspec.Meta(ge=0.0, le=43_200.0)] = 5.0
    """Requests that arrive so soon after a switch are not counted: the batch still holds the other arm's."""


class ReportOnly(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="action", tag="report"):
    """Changes nothing at the end."""


class Promote(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="action", tag="promote"):
    """Makes the winner the default, watches it, and takes it back if a guardrail breaks."""

    cool_down_seconds: Annotated[float, msgspec.Meta(ge=0.0, le=604_800.0)] = 600.0
    holdback: Annotated[float, msgspec.Meta(ge=0.01, le=0.5)] = 0.1
    """Share of the traffic that stays with the first arm during the cool-down, to compare with."""


class Definition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """An experiment as a user writes it. The first arm is the one that the others are compared with."""

    name: str
    hypothesis: Text = ""
    arms: Annotated[list[Arm], msgspec.Meta(max_length=MAX_ARMS)]
    unit: str = "request"
    """What is assigned: "request", "user", or "header:NAME", whose value is hashed. Requests without it stay out."""
    filter: Filter = Filter()
    metric: Metric = "tpot"
    guardrails: Annotated[list[Guardrail], msgspec.Meta(max_length=8)] = []
    min_samples: Annotated[int, msgspec.Meta(ge=40, le=100_000_000)] = 200
    """Finished requests, all arms together, before anything is concluded."""
    max_samples: Annotated[int, msgspec.Meta(ge=40, le=100_000_000)] = 20_000
    significance: Annotated[float, msgspec.Meta(ge=0.0001, le=0.2)] = 0.05
    """Probability of a false conclusion over the whole experiment, whenever one looks, however many arms there are."""
    expected_effect: Annotated[float, msgspec.Meta(ge=0.005, le=1.0)] = 0.1
    """The intervals are tightest for differences of about this size; any other is found too."""
    adjust: bool = True
    """Conclude from the estimate that is adjusted by covariates; the plain one is reported beside it."""
    allocation: Fixed | Adaptive | Switchback = Fixed()
    at_end: ReportOnly | Promote = ReportOnly()

    @property
    def is_clustered(self) -> bool:
        """Whether requests are assigned together, so that only whole units are independent."""
        return self.unit != "request" or isinstance(self.allocation, Switchback)

    @property
    def arm_names(self) -> list[str]:
        return [arm.name for arm in self.arms]


Status = Literal["draft", "running", "stopped", "promoted"]


class Promotion(msgspec.Struct, frozen=True, kw_only=True):
    """An arm that was made the default."""

    arm: int
    profile: str
    previous: str | None
    """The default before; None is the engine's own."""
    at: float
    until: float
    """End of the cool-down."""
    by_hand: bool
    holdback: float
    """Share of the traffic that stays with the first arm until then."""
    rolled_back_at: float | None = None
    reason: str = ""
    """Why it was rolled back."""


class Experiment(msgspec.Struct, frozen=True, kw_only=True):
    """A definition and what became of it. Times in seconds since the epoch."""

    definition: Definition
    configs: list[SpeculationConfig]
    """Each arm's, as it was when the experiment was created."""
    versions: list[int | None]
    """Of the profiles they came from."""
    salt: str
    """Random: makes assignments independent of every other experiment's."""
    status: Status
    created_at: float
    weights: list[float]
    """Shares of the arms now; with adaptive allocation they change."""
    revision: int = 0
    """Grows with every change."""
    started_at: float | None = None
    ended_at: float | None = None
    ended_because: str = ""
    warnings: list[str] = []
    promotion: Promotion | None = None

    @property
    def name(self) -> str:
        return self.definition.name

    @property
    def is_cooling_down(self) -> bool:
        return self.status == "promoted" and self.promotion is not None and self.ended_at is None

    @property
    def takes_traffic(self) -> bool:
        return self.status == "running" or self.is_cooling_down

    @property
    def tally_key(self) -> str:
        """Where the numbers of the present phase are kept: those of a cool-down are not mixed with the experiment's."""
        return self.keys[1] if self.is_cooling_down else self.keys[0]

    @property
    def keys(self) -> tuple[str, str]:
        """Of the experiment, and of its cool-down."""
        return self.salt, f"{self.salt}-watch"

    def closed_at(self, key: str) -> float | None:
        """When the phase whose numbers are kept under `key` took its last request; None while it takes more."""
        if key == self.keys[0] and self.promotion is not None:
            return self.promotion.at
        return self.ended_at
