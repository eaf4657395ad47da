"""Names of speculation configs: of profiles, and of methods with their defaults."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress

import msgspec

from service.errors import ApiError, did_you_mean, shorten
from speculation.messages import SpeculationConfig, method_of, single_configs

NEEDS = {
    "eagle3": "the service has none of its heads: start it with --eagle3 DIR",
    "medusa": "the service has none of its heads: start it with --medusa DIR",
    "draft_model": "the service has no draft model: start it with --draft-model FOLDER_OR_FILE",
    "first": 'it needs its proposers: {"method": "first", "proposers": [{"method": "suffix"}, {"method": "ngram"}]}',
}
"""Methods that may not be there by their name alone, and what they need."""


def method_profiles(methods: Iterable[str]) -> dict[str, SpeculationConfig]:
    """Each method under its own name, where it has defaults for everything."""
    profiles: dict[str, SpeculationConfig] = {}
    for method in methods:
        with suppress(msgspec.ValidationError):
            profiles[method] = msgspec.convert({"method": method}, SpeculationConfig)
    return profiles


def named_config(name: str, profiles: Mapping[str, SpeculationConfig], methods: Collection[str]) -> SpeculationConfig:
    """The config of a profile's or a method's name. Raises `ApiError` (400) for any other."""
    found = profiles.get(name)
    if found is not None:
        return found
    known = method_profiles(methods)
    if name in known:
        return known[name]
    if name in NEEDS:
        message = f"speculation is the method {name!r}, which cannot be used by its name here: {NEEDS[name]}"
        raise ApiError.invalid("speculation", message)
    hint = did_you_mean(name, {*profiles, *known})
    raise ApiError.invalid(
        "speculation", f"speculation names {shorten(name)}, which is no profile and no method; {hint}"
    )


def missing_method(error: ValueError, config: SpeculationConfig, methods: Collection[str]) -> ApiError:
    """The error for a config that names a method which the service does not have, and what that one needs."""
    names = [method_of(single) for single in single_configs(config)]
    needs = [NEEDS[name] for name in names if name in NEEDS and name not in methods]
    return ApiError.invalid("speculation.method", "; ".join([f"speculation: {error}", *needs]))
