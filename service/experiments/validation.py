"""From a body to a definition, or an error that names the field, its value and what is right."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import get_args

import msgspec

from service.errors import ApiError, cut, did_you_mean
from service.experiments.model import Adaptive, Arm, Definition, Experiment, Filter, Profile, Switchback
from service.validation import parse_body
from speculation.messages import SpeculationConfig

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Names stand in addresses, headers, metrics and pages: nothing in them needs escaping anywhere."""
LINE = re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]*")
"""Text on one line: no control character, and nothing that changes its direction."""
HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}")
"""A header's name [RFC 9110]."""
SECRET_HEADERS = frozenset({"authorization", "cookie", "proxy-authorization", "x-api-key"})
"""Definitions are shown to everybody who may see the page."""
METHODS = frozenset(str(kind.__struct_config__.tag) for kind in get_args(SpeculationConfig))
"""What a request may name in place of a profile."""


def parse_definition(body: bytes) -> Definition:
    """An experiment's definition, each field right in itself and with the others. Raises `ApiError` (400)."""
    definition = parse_body(_spelled_out(body), Definition)
    check_name(definition.name, "name")
    for param, text in _texts(definition):
        if not LINE.fullmatch(text):
            raise ApiError.invalid(param, f"{param} is {_shown(text)}; it must be one line without control characters")
    _check_arms(definition.arms)
    _check_unit(definition.unit)
    _check_filter(definition.filter)
    _check_guardrails(definition)
    _check_allocation(definition)
    if definition.min_samples > definition.max_samples:
        raise ApiError.invalid(
            "min_samples",
            f"min_samples is {definition.min_samples}; it must be at most max_samples, {definition.max_samples}",
        )
    return definition


def check_name(name: str, param: str) -> str:
    """A name that a profile, an experiment or an arm can have. Raises `ApiError` (400) for any other."""
    if not NAME.fullmatch(name):
        rule = "it must be 1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit"
        raise ApiError.invalid(param, f"{param} is {_shown(name)}; {rule}")
    return name


def check_profile_name(name: str) -> str:
    """A name that a profile can have: no method's. Raises `ApiError` (400) for any other."""
    if check_name(name, "name") in METHODS:
        raise ApiError.invalid("name", f"name is {name!r}, which is a method; a profile needs another name")
    return name


def resolve_arms(
    definition: Definition, profiles: Mapping[str, Profile], check: Callable[[SpeculationConfig], None]
) -> tuple[list[SpeculationConfig], list[int | None]]:
    """Each arm's config, and the version of the profile it came from. `check` raises ValueError for what is not served.

    Raises `ApiError` (400) for an unknown profile or a config that this service cannot run.
    """
    configs: list[SpeculationConfig] = []
    versions: list[int | None] = []
    for index, arm in enumerate(definition.arms):
        field = f"arms[{index}].{'speculation' if arm.profile is None else 'profile'}"
        if arm.profile is not None and arm.profile not in profiles:
            hint = did_you_mean(arm.profile, profiles) if profiles else "there are no profiles yet"
            raise ApiError.invalid(field, f"{field} is {_shown(arm.profile)}, which is no profile; {hint}")
        profile = None if arm.profile is None else profiles[arm.profile]
        config = arm.speculation if profile is None else profile.speculation
        assert config is not None, "an arm has a profile or a config"
        try:
            check(config)
        except ValueError as error:
            raise ApiError.invalid(field, f"{field}: {error}") from None
        configs.append(config)
        versions.append(None if profile is None else profile.version)
    return configs, versions


def initial_weights(definition: Definition) -> list[float]:
    given = [arm.weight for arm in definition.arms if arm.weight is not None]
    return given or [1.0 / len(definition.arms)] * len(definition.arms)


def overlapping(definition: Definition, experiments: Sequence[Experiment]) -> Experiment | None:
    """The first experiment that takes traffic which the new one's filter would take as well."""
    return next(
        (
            other
            for other in experiments
            if other.takes_traffic and filters_overlap(definition.filter, other.definition.filter)
        ),
        None,
    )


def filters_overlap(one: Filter, other: Filter) -> bool:
    """Whether some request could satisfy both."""

    def differ(a: str | None, b: str | None) -> bool:
        return a is not None and b is not None and a != b

    if differ(one.model, other.model) or differ(one.route, other.route):
        return False
    # Different headers may come in one request; one header has one value.
    is_same_header = one.header and other.header and one.header.name.lower() == other.header.name.lower()
    if one.header and other.header and is_same_header and one.header.value != other.header.value:
        return False
    low = max(one.min_prompt_tokens or 0, other.min_prompt_tokens or 0)
    highs = [high for high in (one.max_prompt_tokens, other.max_prompt_tokens) if high is not None]
    return not highs or low <= min(highs)


def filter_warnings(
    chosen: Filter, models: Collection[str], routes: Collection[str], max_prompt_tokens: int
) -> list[str]:
    """Why no request of this service would ever satisfy a filter. Empty collections and 0 know nothing."""
    warnings = []
    if chosen.model is not None and models and chosen.model not in models:
        warnings.append(f"filter.model {_shown(chosen.model)} matches nothing; {did_you_mean(chosen.model, models)}")
    if chosen.route is not None and routes and chosen.route not in routes:
        warnings.append(f"filter.route {_shown(chosen.route)} matches nothing; {did_you_mean(chosen.route, routes)}")
    if chosen.min_prompt_tokens is not None and 0 < max_prompt_tokens < chosen.min_prompt_tokens:
        least = chosen.min_prompt_tokens
        warnings.append(
            f"filter.min_prompt_tokens {least} matches nothing; prompts have at most {max_prompt_tokens} tokens"
        )
    return warnings


def _spelled_out(body: bytes) -> bytes:
    """A body in which `allocation` and `at_end` are objects, also where their kind alone was written."""
    try:
        tree = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return body
    if not isinstance(tree, dict):
        return body
    for field, tag in (("allocation", "kind"), ("at_end", "action")):
        if isinstance(tree.get(field), str):
            tree[field] = {tag: tree[field]}
    return msgspec.json.encode(tree)


def _texts(definition: Definition) -> Iterator[tuple[str, str]]:
    """What users may write freely, with its path."""
    yield "hypothesis", definition.hypothesis
    chosen = definition.filter
    header = None if chosen.header is None else chosen.header.value
    for field, text in (("model", chosen.model), ("route", chosen.route), ("header.value", header)):
        if text is not None:
            yield f"filter.{field}", text


def _check_arms(arms: list[Arm]) -> None:
    if len(arms) < 2:
        raise ApiError.invalid("arms", f"arms has {len(arms)}; an experiment compares at least 2")
    seen: set[str] = set()
    for index, arm in enumerate(arms):
        at = f"arms[{index}]"
        check_name(arm.name, f"{at}.name")
        if arm.name in seen:
            raise ApiError.invalid(f"{at}.name", f"{at}.name is {arm.name!r} a second time; names must differ")
        seen.add(arm.name)
        if (arm.profile is None) == (arm.speculation is None):
            has = "neither profile nor speculation" if arm.profile is None else "both profile and speculation"
            raise ApiError.invalid(at, f"{at} has {has}; it must have exactly one of them")
    _check_weights(arms)


def _check_weights(arms: list[Arm]) -> None:
    given = [arm.weight for arm in arms if arm.weight is not None]
    if given and len(given) < len(arms):
        at = f"arms[{[arm.weight for arm in arms].index(None)}].weight"
        raise ApiError.invalid(at, f"{at} is missing; give one to every arm, or to none for equal shares")
    if given and abs(sum(given) - 1.0) > 1e-6:
        raise ApiError.invalid("arms", f"weights of arms sum to {sum(given):g}; they must sum to 1")


def _check_unit(unit: str) -> None:
    kind, _, header = unit.partition(":")
    if unit not in {"request", "user"} and not (kind == "header" and HEADER.fullmatch(header)):
        raise ApiError.invalid("unit", f"unit is {_shown(unit)}; it must be request, user or header:NAME")


def _check_filter(chosen: Filter) -> None:
    name = None if chosen.header is None else chosen.header.name
    if name is not None and (not HEADER.fullmatch(name) or name.lower() in SECRET_HEADERS):
        why = "it must be the name of a header that holds no secret"
        raise ApiError.invalid("filter.header.name", f"filter.header.name is {_shown(name)}; {why}")
    low, high = chosen.min_prompt_tokens, chosen.max_prompt_tokens
    if low is not None and high is not None and low > high:
        raise ApiError.invalid(
            "filter.min_prompt_tokens",
            f"filter.min_prompt_tokens is {low}; it must be at most max_prompt_tokens, {high}",
        )


def _check_guardrails(definition: Definition) -> None:
    seen: set[str] = set()
    for index, guardrail in enumerate(definition.guardrails):
        at = f"guardrails[{index}]"
        if guardrail.metric in seen:
            raise ApiError.invalid(f"{at}.metric", f"{at}.metric is {guardrail.metric!r} a second time; once is enough")
        seen.add(guardrail.metric)
        if guardrail.limit is None and guardrail.max_worsening is None:
            raise ApiError.invalid(at, f"{at} has neither limit nor max_worsening; it must have at least one")
        if guardrail.metric == "error_rate":
            for field, share in (("limit", guardrail.limit), ("max_worsening", guardrail.max_worsening)):
                if share is not None and share > 1.0:
                    raise ApiError.invalid(f"{at}.{field}", f"{at}.{field} is {share:g}; a share must be at most 1")


def _check_allocation(definition: Definition) -> None:
    allocation = definition.allocation
    if not isinstance(allocation, Adaptive | Switchback):
        return
    if definition.unit != "request":
        why = "what adapts its weights must be free to move each request"
        if isinstance(allocation, Switchback):
            why = "switchback assigns whole time slots"
        raise ApiError.invalid("unit", f"unit is {definition.unit!r}; it must be request here: {why}")
    weights = initial_weights(definition)
    if isinstance(allocation, Adaptive):
        most = 1.0 / len(weights)
        if allocation.floor >= most or min(weights) < allocation.floor:
            raise ApiError.invalid(
                "allocation.floor",
                f"allocation.floor is {allocation.floor:g}; with these arms it must be below {most:g}, "
                f"and no weight below it",
            )
        return
    if max(weights) - min(weights) > 1e-6:
        raise ApiError.invalid("arms", "weights of arms differ; switchback gives every arm the same number of slots")
    if allocation.washout_seconds > allocation.slot_seconds / 2:
        raise ApiError.invalid(
            "allocation.washout_seconds",
            f"allocation.washout_seconds is {allocation.washout_seconds:g}; it must be at most half of "
            f"slot_seconds, {allocation.slot_seconds:g}",
        )


def _shown(value: object) -> str:
    """A value for a message: short, on one line, in printable characters."""
    return cut(ascii(value))
