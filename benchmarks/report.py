"""From single answers to a table by category."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

import msgspec

from benchmarks.machine import Machine
from benchmarks.system import Answer

ALL = "all"


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One request, or several that ran at the same time, on one system."""

    system: str
    method: str
    precision: str
    category: str | None
    """None for several of different categories."""
    num_prompt_tokens: float
    """Of several, their median."""
    num_tokens: int
    tokens_per_second: float | None
    ttft_seconds: float | None
    num_drafts: int | None
    num_accepted: int
    gap_seconds: float | None
    cpu_seconds: float | None
    is_exact: bool | None
    """Whether the token ids were those of plain decoding; None for other systems, which compute differently."""

    @property
    def key(self) -> tuple[str, str]:
        return self.system, self.method


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One system and method on one category. Medians over its requests; a ratio is one of medians."""

    system: str
    method: str
    category: str
    tokens_per_second: float | None
    """After the first token; of several requests at a time, all their tokens over all their time."""
    ttft_ms: float | None
    prompt_tokens: float
    """Median length of the prompts, which the time to first token depends on."""
    mean_acceptance_length: float | None
    """1 + accepted / drafts, over all requests; None where a system does not tell."""
    speedup: float | None
    """tokens_per_second over that of forerun's plain decoding."""
    exact: bool | None
    precision: str


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """What the service around the engine costs, under one method."""

    method: str
    gap_ms: float | None
    """Median time between two arrivals at the client."""
    added_gap_ms: float | None
    """Of it, what the engine alone does not take: HTTP, the engine's socket, detokenising, server-sent events."""
    front_cpu_ms_per_token: float | None
    front_core_share_at_500: float | None
    """Share of one core that the front would use at 500 tokens/s."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run."""

    rows: list[Row]
    exact: bool
    """Whether every method of forerun gave the token ids of plain decoding on every request."""
    service: list[Service]
    settings: dict[str, str | int | float | None]
    machine: Machine
    machine_at_end: Machine


def of_answer(
    answer: Answer,
    *,
    system: str,
    method: str,
    precision: str,
    category: str,
    num_prompt_tokens: int,
    is_exact: bool | None,
) -> Measurement:
    """One request that ran alone."""
    return Measurement(
        system=system,
        method=method,
        precision=precision,
        category=category,
        num_prompt_tokens=num_prompt_tokens,
        num_tokens=answer.num_tokens,
        tokens_per_second=answer.tokens_per_second,
        ttft_seconds=answer.ttft_seconds,
        num_drafts=answer.num_drafts,
        num_accepted=answer.num_accepted,
        gap_seconds=answer.gap_seconds,
        cpu_seconds=answer.cpu_seconds,
        is_exact=is_exact,
    )


def of_group(
    answers: Sequence[Answer],
    *,
    system: str,
    method: str,
    precision: str,
    num_prompt_tokens: float,
    is_exact: bool | None,
) -> Measurement:
    """Requests that were sent at the same time: all their tokens, over the time until the last one came."""
    drafts = [answer.num_drafts for answer in answers if answer.num_drafts is not None]
    num_tokens = sum(answer.num_tokens for answer in answers)
    return Measurement(
        system=system,
        method=method,
        precision=precision,
        category=None,
        num_prompt_tokens=num_prompt_tokens,
        num_tokens=num_tokens,
        tokens_per_second=num_tokens / max(answer.seconds for answer in answers),
        ttft_seconds=middle(answer.ttft_seconds for answer in answers),
        num_drafts=sum(drafts) if drafts else None,
        num_accepted=sum(answer.num_accepted for answer in answers),
        gap_seconds=middle(answer.gap_seconds for answer in answers),
        cpu_seconds=total(answer.cpu_seconds for answer in answers),
        is_exact=is_exact,
    )


def rows_of(measurements: Sequence[Measurement]) -> list[Row]:
    """A row for every category and system in order of appearance, and last those of the category "all"."""
    categories = dict.fromkeys(found.category for found in measurements if found.category is not None)
    return [row for category in (*categories, ALL) for row in _rows_of_category(category, measurements)]


def _rows_of_category(category: str, measurements: Sequence[Measurement]) -> list[Row]:
    groups: dict[tuple[str, str], list[Measurement]] = {}
    for found in measurements:
        if category in {found.category, ALL}:
            groups.setdefault(found.key, []).append(found)
    plain = middle(found.tokens_per_second for found in groups.get(("forerun", "none"), []))
    return [_row(category, group, plain) for group in groups.values()]


def _row(category: str, group: Sequence[Measurement], plain: float | None) -> Row:
    rate = middle(found.tokens_per_second for found in group)
    ttft = middle(found.ttft_seconds for found in group)
    drafts = total(found.num_drafts for found in group)
    exact = [found.is_exact for found in group if found.is_exact is not None]
    length = 1.0 + sum(found.num_accepted for found in group) / max(drafts, 1) if drafts is not None else None
    return Row(
        system=group[0].system,
        method=group[0].method,
        category=category,
        tokens_per_second=rate,
        ttft_ms=None if ttft is None else 1000.0 * ttft,
        prompt_tokens=median(found.num_prompt_tokens for found in group),
        mean_acceptance_length=length,
        speedup=None if rate is None or plain is None else rate / plain,
        exact=all(exact) if exact else None,
        precision=group[0].precision,
    )


def service_of(measurements: Sequence[Measurement]) -> list[Service]:
    """What the service costs under each method of forerun."""
    engine_gap = middle(found.gap_seconds for found in measurements if found.system == "forerun-engine")
    methods = dict.fromkeys(found.method for found in measurements if found.system == "forerun")
    return [
        _service(method, [found for found in measurements if found.key == ("forerun", method)], engine_gap)
        for method in methods
    ]


def _service(method: str, group: Sequence[Measurement], engine_gap: float | None) -> Service:
    gap = middle(found.gap_seconds for found in group)
    cpu = total(found.cpu_seconds for found in group)
    cpu_per_token = None if cpu is None else cpu / max(sum(found.num_tokens for found in group), 1)
    is_comparable = gap is not None and engine_gap is not None and method == "none"
    return Service(
        method=method,
        gap_ms=None if gap is None else 1000.0 * gap,
        added_gap_ms=1000.0 * (gap - engine_gap) if is_comparable and gap and engine_gap else None,
        front_cpu_ms_per_token=None if cpu_per_token is None else 1000.0 * cpu_per_token,
        front_core_share_at_500=None if cpu_per_token is None else 500.0 * cpu_per_token,
    )


def middle(values: Iterable[float | None]) -> float | None:
    """The median of those that are known."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def total(values: Iterable[float | None]) -> float | None:
    """The sum of those that are known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
