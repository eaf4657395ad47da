"""All profiles and experiments at one revision of the store, and every change that can be made to them.

A change is a function from a book to the documents that differ: it is computed from what is, and written only if that
is still so. Two fronts can therefore not both start experiments on the same traffic.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from service.errors import ApiError, did_you_mean, shorten
from service.experiments.model import Arm, Definition, Experiment, Profile, Promote, Promotion
from service.experiments.store import Snapshot
from service.experiments.validation import initial_weights, overlapping, resolve_arms
from speculation.messages import SpeculationConfig

MAX_PROFILES = 200
MAX_EXPERIMENTS = 200

Changes = dict[str, object]
"""Documents by name; None removes one."""
Check = Callable[[SpeculationConfig], None]
"""Raises ValueError for a config that is not served."""


class Book(msgspec.Struct, frozen=True, kw_only=True):
    """What a front knows."""

    revision: int = 0
    profiles: dict[str, Profile] = {}
    default: str | None = None
    """The profile of requests that ask for none; None is the engine's own config."""
    experiments: dict[str, Experiment] = {}
    unreadable: dict[str, str] = {}
    """Documents that this version cannot read, by their full names, each with the reason. They stay as they are."""

    @classmethod
    def decode(cls, snapshot: Snapshot) -> Book:
        """The documents of a snapshot. One that cannot be read is left out, and named in `unreadable`."""
        profiles, experiments, default, unreadable = {}, {}, None, {}
        for name, document in snapshot.documents.items():
            kind, _, key = name.partition("/")
            try:
                if kind == "profile":
                    profiles[key] = _profile(key, document)
                elif kind == "experiment":
                    experiments[key] = _experiment(key, document)
                elif kind == "default":
                    default = msgspec.msgpack.decode(document, type=str)
            except (ValueError, RecursionError) as error:
                unreadable[name] = str(error)[:200]
        return cls(
            revision=snapshot.revision,
            profiles=profiles,
            default=default,
            experiments=experiments,
            unreadable=unreadable,
        )

    def documents(self) -> Changes:
        """What would make an empty store hold this."""
        found: Changes = {f"profile/{name}": profile for name, profile in self.profiles.items()}
        found |= {f"experiment/{name}": experiment for name, experiment in self.experiments.items()}
        return found if self.default is None else found | {"default": self.default}

    @property
    def live(self) -> list[Experiment]:
        """Experiments that take traffic. No request belongs to two."""
        return [experiment for experiment in self.experiments.values() if experiment.takes_traffic]

    def experiment(self, name: str) -> Experiment:
        """Raises `ApiError`: 404, or 409 for one that this version cannot read."""
        self.check_readable("experiment", name)
        if name not in self.experiments:
            raise ApiError(404, f"no experiment is called {shorten(name)}{_hint(name, self.experiments)}", param="name")
        return self.experiments[name]

    def profile(self, name: str) -> Profile:
        """Raises `ApiError`: 404, or 409 for one that this version cannot read."""
        self.check_readable("profile", name)
        if name not in self.profiles:
            raise ApiError(404, f"no profile is called {shorten(name)}{_hint(name, self.profiles)}", param="name")
        return self.profiles[name]

    def check_readable(self, kind: str, name: str) -> None:
        """Raises `ApiError` (409) if the store has a document of that name that this version cannot read."""
        reason = self.unreadable.get(f"{kind}/{name}")
        if reason is not None:
            raise ApiError(
                409,
                f"{kind} {name!r} is in the store, but this version of forerun cannot read it ({reason}): change it "
                f"with the version that wrote it, or delete it",
                param="name",
                code="unreadable_document",
            )


def encode(changes: Mapping[str, object], present: Mapping[str, bytes] | None = None) -> dict[str, bytes | None]:
    """The documents of `changes`. Fields that a newer version has put into one that is `present` are kept."""
    stored = present or {}
    return {name: None if value is None else _encode(value, stored.get(name)) for name, value in changes.items()}


def _encode(value: object, present: bytes | None) -> bytes:
    if present is None or not isinstance(value, msgspec.Struct):
        return msgspec.msgpack.encode(value)
    try:
        stored = msgspec.msgpack.decode(present)
    except (ValueError, RecursionError):
        stored = None
    return msgspec.msgpack.encode(_with_unknown_fields(value, stored))


def _with_unknown_fields(value: msgspec.Struct, stored: object) -> msgspec.Struct | dict[str, Any]:
    """`value` with the fields of `stored` that its type does not have; those of the structs inside it, too."""
    if not isinstance(stored, dict) or value.__struct_config__.forbid_unknown_fields:
        return value
    fields = msgspec.structs.asdict(value)
    for name, inner in fields.items():
        if isinstance(inner, msgspec.Struct):
            fields[name] = _with_unknown_fields(inner, stored.get(name))
    unknown = {name: field for name, field in stored.items() if name not in fields}
    return {**fields, **unknown} if unknown or any(isinstance(inner, dict) for inner in fields.values()) else value


def _profile(name: str, document: bytes) -> Profile:
    """Raises ValueError for what is no profile of that name."""
    profile = msgspec.msgpack.decode(document, type=Profile)
    if profile.name != name:
        raise ValueError(f"it is profile {profile.name[:64]!r}")
    return profile


def _experiment(name: str, document: bytes) -> Experiment:
    """Raises ValueError for what is no experiment of that name, or contradicts itself."""
    experiment = msgspec.msgpack.decode(document, type=Experiment)
    if experiment.name != name:
        raise ValueError(f"it is experiment {experiment.name[:64]!r}")
    num_arms = len(experiment.definition.arms)
    if not num_arms or {len(experiment.configs), len(experiment.versions), len(experiment.weights)} != {num_arms}:
        raise ValueError(f"it has {num_arms} arms, but not as many configs, versions and weights")
    weights = experiment.weights
    if not all(math.isfinite(weight) and weight >= 0.0 for weight in weights) or not any(weights):
        raise ValueError("its weights are no shares of traffic")
    if experiment.promotion is not None and not 0 <= experiment.promotion.arm < num_arms:
        raise ValueError("the arm that it promoted is none of its own")
    return experiment


def put_profile(book: Book, name: str, config: SpeculationConfig, now: float, *, is_default: bool | None) -> Changes:
    """A new profile, or a new version of one. Raises `ApiError` (409) for a name whose document cannot be read."""
    book.check_readable("profile", name)
    known = book.profiles.get(name)
    if known is None and len(book.profiles) >= MAX_PROFILES:
        raise conflict(f"there are {MAX_PROFILES} profiles, the most that are kept; delete one first")
    changes: Changes = {}
    if known is None or known.speculation != config:
        version = 1 if known is None else known.version + 1
        changes[f"profile/{name}"] = Profile(name=name, version=version, speculation=config, updated_at=now)
    if is_default:
        return changes | {"default": name}
    return changes | {"default": None} if is_default is False and book.default == name else changes


def delete_profile(book: Book, name: str) -> Changes:
    """Raises `ApiError` (409) for the default, and for what a running experiment would fall back to.

    A document that cannot be read is removed, too: who names it means it.
    """
    if f"profile/{name}" not in book.unreadable:
        book.profile(name)
    if book.default == name:
        remedy = 'PUT it with "default": false, or make another one the default'
        raise conflict(f"profile {name!r} is the default; {remedy} first")
    for experiment in book.live:
        if experiment.promotion is not None and experiment.promotion.previous == name:
            raise conflict(f"experiment {experiment.name!r} may roll back to profile {name!r}; wait, or stop it first")
    return {f"profile/{name}": None}


def create(
    book: Book, definition: Definition, check: Check, warnings: list[str], now: float, *, is_draft: bool
) -> Changes:
    """A new experiment, running unless it is a draft. Raises `ApiError`."""
    name = definition.name
    book.check_readable("experiment", name)
    if name in book.experiments:
        raise conflict(f"an experiment is called {name!r} already; choose another name, or delete it", "name")
    if len(book.experiments) >= MAX_EXPERIMENTS:
        raise conflict(f"there are {MAX_EXPERIMENTS} experiments, the most that are kept; delete one first")
    configs, versions = resolve_arms(definition, book.profiles, check)
    experiment = Experiment(
        definition=definition,
        configs=configs,
        versions=versions,
        salt=secrets.token_hex(16),
        status="draft",
        created_at=now,
        weights=initial_weights(definition),
        warnings=warnings,
    )
    return _saved(experiment if is_draft else _started(book, experiment, now))


def replace(book: Book, definition: Definition, check: Check, warnings: list[str], now: float) -> Changes:
    """Another definition for a draft. Raises `ApiError`: what has run stays what it was."""
    experiment = book.experiment(definition.name)
    if experiment.status != "draft":
        raise conflict(
            f"experiment {definition.name!r} is {experiment.status} and stays as it is; stop it, and create a copy "
            f"under another name",
            "name",
        )
    without = {name: one for name, one in book.experiments.items() if name != definition.name}
    others = msgspec.structs.replace(book, experiments=without)
    return create(others, definition, check, warnings, now, is_draft=True)


def start(book: Book, name: str, now: float) -> Changes:
    """Raises `ApiError` (409) unless it is a draft whose traffic nobody else takes."""
    experiment = book.experiment(name)
    if experiment.status != "draft":
        raise conflict(f"experiment {name!r} is {experiment.status}; only a draft can be started: copy it")
    return _saved(_started(book, experiment, now))


def stop(book: Book, name: str, now: float, because: str) -> Changes:
    """End an experiment, or a cool-down, whose default then stays."""
    experiment = book.experiment(name)
    if not experiment.takes_traffic:
        raise conflict(f"experiment {name!r} is {experiment.status}; there is nothing to stop")
    if experiment.is_cooling_down:
        return _saved(msgspec.structs.replace(experiment, ended_at=now))
    return _saved(msgspec.structs.replace(experiment, status="stopped", ended_at=now, ended_because=because))


def promote(book: Book, name: str, arm: int, now: float, because: str, *, by_hand: bool) -> Changes:
    """Make an arm's config the default, and watch it against the first arm for the cool-down."""
    experiment = book.experiment(name)
    if experiment.status == "draft" or experiment.is_cooling_down:
        state = "cooling down from a promotion" if experiment.is_cooling_down else "a draft"
        raise conflict(f"experiment {name!r} is {state}; stop it or start it first")
    others = [other for other in book.experiments.values() if other.name != name]
    rival = overlapping(experiment.definition, others)
    if rival is not None:
        raise conflict(f"experiment {rival.name!r} takes traffic that the cool-down needs; stop it first")
    at_end = experiment.definition.at_end
    rules = at_end if isinstance(at_end, Promote) else Promote()
    profile, changes = _profile_of(book, experiment, arm, now)
    promotion = Promotion(
        arm=arm,
        profile=profile,
        previous=book.default,
        at=now,
        until=now + rules.cool_down_seconds,
        by_hand=by_hand,
        holdback=rules.holdback,
    )
    # The first arm has nothing to be watched against.
    ended_at = now if arm == 0 else None
    promoted = msgspec.structs.replace(
        experiment, status="promoted", ended_at=ended_at, ended_because=because, promotion=promotion
    )
    return changes | {"default": profile} | _saved(promoted)


def roll_back(book: Book, name: str, now: float, reason: str) -> Changes:
    """Take a promotion back: the default is what it was before, unless somebody has changed it since."""
    experiment = book.experiment(name)
    promotion = experiment.promotion
    if promotion is None or not experiment.is_cooling_down:
        return {}
    promotion = msgspec.structs.replace(promotion, rolled_back_at=now, reason=reason)
    changes = _saved(msgspec.structs.replace(experiment, status="stopped", ended_at=now, promotion=promotion))
    return changes | {"default": promotion.previous} if book.default == promotion.profile else changes


def reweigh(book: Book, name: str, weights: list[float]) -> Changes:
    experiment = book.experiments.get(name)
    if experiment is None or experiment.status != "running":
        return {}
    return _saved(msgspec.structs.replace(experiment, weights=weights))


def delete(book: Book, name: str) -> Changes:
    """Raises `ApiError` (409) for an experiment that takes traffic. One that cannot be read is removed, too."""
    if f"experiment/{name}" not in book.unreadable and book.experiment(name).takes_traffic:
        raise conflict(f"experiment {name!r} takes traffic; stop it first")
    return {f"experiment/{name}": None}


def conflict(message: str, param: str | None = None) -> ApiError:
    return ApiError(409, message, param=param, code="conflict")


def _started(book: Book, experiment: Experiment, now: float) -> Experiment:
    rival = overlapping(experiment.definition, list(book.experiments.values()))
    if rival is not None:
        raise conflict(
            f"experiment {rival.name!r} takes some of the same traffic; stop it, or choose filters that no request "
            f"satisfies both of",
            "filter",
        )
    return msgspec.structs.replace(experiment, status="running", started_at=now)


def _profile_of(book: Book, experiment: Experiment, arm: int, now: float) -> tuple[str, Changes]:
    """A profile that holds exactly what was tested: the arm's own unless it has changed since, else a new one."""
    chosen: Arm = experiment.definition.arms[arm]
    config = experiment.configs[arm]
    own = book.profiles.get(chosen.profile or "")
    if own is not None and own.speculation == config:
        return own.name, {}
    name = f"{experiment.name}.{chosen.name}"[:64]
    return name, put_profile(book, name, config, now, is_default=None)


def _saved(experiment: Experiment) -> Changes:
    return {f"experiment/{experiment.name}": msgspec.structs.replace(experiment, revision=experiment.revision + 1)}


def _hint(name: str, known: Mapping[str, object]) -> str:
    return f"; {did_you_mean(name, known)}" if known else "; there are none"
