"""Everything an operator can set, in one frozen tree: defaults, then a TOML file, then environment, then flags."""

from __future__ import annotations

import argparse
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from service.api_key import API_KEY_VARIABLE
from service.errors import ApiError, did_you_mean
from service.experiments.validation import check_profile_name
from service.foreign_fields import UnknownFields
from service.pool.settings import ListenerSettings, PoolSettings, TenantSettings
from service.request_log import RecordingSettings
from service.schema import MinP, RepetitionPenalty, Temperature, TopK, TopP
from service.service_url import URL_VARIABLE
from service.validation import explain
from speculation.messages import MAX_LOGPROBS, AutoConfig, SamplingDefaults, SpeculationConfig, method_of
from speculation.settings import EngineSettings, PositiveInt

PREFIX = "FORERUN_"
NONE = "none"
"""Turns off, in a flag, a variable or the file, what may be absent."""
Seconds = Annotated[float, Meta(gt=0.0)]


class SettingsError(ValueError):
    """A setting is unknown or has a wrong value; the message names it and says what is right."""


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where and how clients are served."""

    host: Annotated[str, Meta(description="address to listen on; the default is reachable from this machine only")] = (
        "127.0.0.1"
    )
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0 takes a free one")] = 8000
    allowed_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="names under which clients reach the service, beside addresses and localhost, separated by "
            'commas; "*" allows any. Without API keys, requests for other hosts are refused'
        ),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...],
        Meta(
            description="origins of other sites whose pages may use the service from a browser (CORS), such as "
            'https://app.example, separated by commas; "*" allows any'
        ),
    ] = ()
    trusted_proxies: Annotated[
        tuple[str, ...],
        Meta(
            description="addresses or networks of proxies, such as 10.0.0.0/8, separated by commas; only their "
            "X-Forwarded-For and X-Forwarded-Host are believed"
        ),
    ] = ()
    server_cert: Annotated[
        str | None, Meta(description="certificate file (PEM) with which clients are served over HTTPS")
    ] = None
    server_key: Annotated[str | None, Meta(description="private key file (PEM) of --server-cert")] = None
    model_name: Annotated[
        str | None,
        Meta(
            description="names of the model in requests, separated by commas and compared without case; responses "
            "have the first. Unset, it is the name of the model's folder or file"
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        Meta(description="folder with the tokenizer's files, where an engine's own folder is not on this machine"),
    ] = None
    access_log: Annotated[
        bool, Meta(description="also log requests of probes, of Prometheus and of the page, one line each")
    ] = False
    generation_config: Annotated[
        Literal["auto", "none"],
        Meta(
            description="\"auto\" takes sampling defaults from the model's generation_config.json or the GGUF file's "
            'general.sampling.*; "none" takes those of OpenAI\'s API, temperature 1 and top_p 1'
        ),
    ] = "auto"
    unknown_fields: Annotated[
        UnknownFields,
        Meta(
            description='"ignore" leaves out request fields that are not known and cannot change the answer, and names '
            'them in the header X-Forerun-Ignored and the log; "refuse" answers 400'
        ),
    ] = "ignore"
    shutdown_seconds: Annotated[
        Seconds, Meta(description="seconds that running requests have to finish after SIGTERM")
    ] = 30.0
    stall_seconds: Annotated[
        Seconds,
        Meta(
            description="disconnect a client that reads nothing, or sends nothing of a request body, for this many "
            "seconds"
        ),
    ] = 60.0
    header_seconds: Annotated[
        Seconds,
        Meta(description="timeout of a request's headers, in seconds from the start of the connection"),
    ] = 10.0
    body_seconds: Annotated[Seconds, Meta(description="timeout of a request's body, in seconds")] = 120.0
    idle_seconds: Annotated[
        Seconds,
        Meta(description="keep-alive timeout of a connection without a request, in seconds; more than the proxy's"),
    ] = 75.0
    max_connections: Annotated[
        PositiveInt | None,
        Meta(
            description="maximum client connections; unset, what the limit of open files allows, at most 10000. Idle "
            "connections are closed for new ones; when all are busy, new ones get 503"
        ),
    ] = None
    load_seconds: Annotated[Seconds, Meta(description="timeout of an engine's start, in seconds")] = 900.0
    restart_seconds: Annotated[
        Seconds, Meta(description="maximum delay before a crashed engine is restarted, in seconds; the first is 0.1")
    ] = 30.0


class LimitSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The most a single request may ask for."""

    max_body_bytes: Annotated[
        PositiveInt | None,
        Meta(
            description="maximum request body or WebSocket message in bytes; unset, what a context of the model's "
            "longest tokens takes, plus 256 KiB, at most 16 MiB"
        ),
    ] = None
    max_pending_bytes: Annotated[
        PositiveInt, Meta(description="maximum bytes of large bodies that are being read or wait to be tokenized")
    ] = 64 * 1024**2
    max_choices: Annotated[PositiveInt, Meta(description="maximum choices of a request: prompts times n")] = 32
    max_stop_strings: Annotated[
        PositiveInt, Meta(description="maximum number of stop strings, and of stop token ids")
    ] = 16
    max_stop_length: Annotated[PositiveInt, Meta(description="maximum characters of a stop string")] = 256
    max_logprobs: Annotated[
        int, Meta(ge=0, le=MAX_LOGPROBS, description="maximum alternatives reported for a token")
    ] = 20
    max_logit_bias: Annotated[int, Meta(ge=0, description="maximum token ids in logit_bias")] = 1024
    max_socket_requests: Annotated[PositiveInt, Meta(description="maximum concurrent generations on one WebSocket")] = (
        64
    )


class SamplingSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling defaults of the service, each in place of the model's own."""

    temperature: Annotated[Temperature | None, Meta(description="temperature of requests that set none")] = None
    top_p: Annotated[TopP | None, Meta(description="top_p of requests that set none")] = None
    top_k: Annotated[TopK | None, Meta(description="top_k of requests that set none; 0 keeps every token")] = None
    min_p: Annotated[MinP | None, Meta(description="min_p of requests that set none")] = None
    repetition_penalty: Annotated[
        RepetitionPenalty | None, Meta(description="repetition penalty of requests that set none")
    ] = None
    max_tokens: Annotated[
        PositiveInt | None, Meta(description="maximum number of tokens of an answer for requests that set none")
    ] = None

    def over(self, model: SamplingDefaults) -> SamplingDefaults:
        """What the settings name, and for everything else what the model's files recommend."""
        given = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        if not given:
            return model
        source = f"{model.source}, settings" if model.source else "settings"
        return msgspec.structs.replace(model, **given, source=source)


class AuditSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The exactness audit."""

    audit_share: Annotated[
        float,
        Meta(
            ge=0.0,
            le=1.0,
            description="share of finished requests that are run again without speculation, while the service is idle, "
            "to compare their tokens; 0 turns the audit off",
        ),
    ] = 0.01


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole tree. In a TOML file each section is a table; flags and variables name the field alone."""

    server: ServerSettings = ServerSettings()
    sampling: SamplingSettings = SamplingSettings()
    limits: LimitSettings = LimitSettings()
    audit: AuditSettings = AuditSettings()
    recording: RecordingSettings = RecordingSettings()
    engine: EngineSettings = EngineSettings()
    pool: PoolSettings = PoolSettings()
    tenants: TenantSettings = TenantSettings()
    listener: ListenerSettings = ListenerSettings()
    profiles: dict[str, SpeculationConfig] = {}
    """Named speculation configs that a request can ask for. In the file only: `[profiles.NAME]`."""


class Option(msgspec.Struct, frozen=True):
    """One field of one section, as flags and variables know it."""

    section: str
    name: str
    default: object
    description: str
    may_be_none: bool
    choices: tuple[str, ...] = ()
    """Allowed values, where they can be listed."""

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        return f"{PREFIX}{self.name.upper()}"

    @property
    def metavar(self) -> str:
        """What stands for the value in the help: the allowed values, or a word."""
        return f"{{{','.join(self.choices)}}}" if self.choices else self.name.rsplit("_", 1)[-1].upper()

    @property
    def shown_default(self) -> str:
        """The default as it would be written in a flag."""
        if self.default in (None, ()):
            return "unset"
        if isinstance(self.default, AutoConfig):
            return method_of(self.default)
        return self.default if isinstance(self.default, str) else msgspec.json.encode(self.default).decode()

    def parse(self, text: str, source: str) -> object:
        """The value that `text` stands for. Raises `SettingsError` that names `source`."""
        if self.may_be_none and text == NONE:
            return None
        value: object = text
        if self.name == "speculation":
            value = _speculation(text, source)
        elif isinstance(self.default, tuple):
            value = [word.strip() for word in text.split(",") if word.strip()]
        tree = {self.section: {self.name: value}}
        try:
            parsed = msgspec.convert(tree, Settings, strict=False)
        except msgspec.ValidationError as error:
            otherwise = f', or "{NONE}"' if self.may_be_none else ""
            raise SettingsError(f"{source}: {explain(str(error), tree, Settings)}{otherwise}") from error
        return getattr(getattr(parsed, self.section), self.name)


def options() -> Iterator[Option]:
    """Every setting that has a flag and a variable."""
    for section in msgspec.structs.fields(Settings):
        if isinstance(section.default, msgspec.Struct):
            hints = typing.get_type_hints(type(section.default), include_extras=True)
            for field in msgspec.structs.fields(type(section.default)):
                hint = hints[field.name]
                described = [meta.description for meta in hint.__metadata__ if meta.description]
                may_be_none = type(None) in typing.get_args(hint.__origin__)
                choices = tuple(map(str, _literal_values(hint.__origin__)))
                yield Option(section.name, field.name, field.default, described[0], may_be_none, choices)


def _literal_values(hint: object) -> tuple[object, ...]:
    """The values of a `Literal`, or of one within a union; none for other types."""
    if typing.get_origin(hint) is Literal:
        return typing.get_args(hint)
    members = typing.get_args(hint) if typing.get_origin(hint) in {typing.Union, UnionType} else ()
    listed = [_literal_values(member) for member in members if member is not type(None)]
    return listed[0] if len(listed) == 1 else ()


def load_settings(
    arguments: Sequence[str], environment: Mapping[str, str], *, program: str = "forerun serve"
) -> Settings:
    """The settings of a start. Raises `SettingsError`; prints help and exits on `--help`."""
    known = {option.name: option for option in options()}
    flags = _parse_flags(arguments, list(known.values()), program)
    config = flags.pop("config", None) or environment.get(f"{PREFIX}CONFIG")
    tree = _read_file(Path(config)) if config else {}
    for variable, text in environment.items():
        # Key and address are for the commands that ask a service; a shell that has them may start one, too.
        if not variable.startswith(PREFIX) or variable in {f"{PREFIX}CONFIG", API_KEY_VARIABLE, URL_VARIABLE}:
            continue
        option = known.get(variable.removeprefix(PREFIX).lower())
        if option is None:
            names = [option.variable for option in known.values()]
            raise SettingsError(f"{variable} is not a setting; {did_you_mean(variable, names)}")
        tree.setdefault(option.section, {})[option.name] = option.parse(text, variable)
    for name, text in flags.items():
        option = known[name]
        tree.setdefault(option.section, {})[name] = option.parse(text, option.flag)
    return _convert(tree)


def _convert(tree: dict[str, Any]) -> Settings:
    """The file's tables and what was laid over them. Values laid over are of their type already."""
    try:
        return msgspec.convert(msgspec.to_builtins(tree), Settings)
    except msgspec.ValidationError as error:
        raise SettingsError(f"settings file: {explain(str(error), tree, Settings)}") from error


def _read_file(path: Path) -> dict[str, Any]:
    try:
        tree = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"settings file {path}: {error}") from error
    _check_names(tree, path)
    for option in options():
        if option.may_be_none and tree.get(option.section, {}).get(option.name) == NONE:
            tree[option.section][option.name] = None
    if isinstance(method := tree.get("engine", {}).get("speculation"), str):
        tree["engine"]["speculation"] = _speculation(method, f"{path}: engine.speculation")
    for name, profile in tree.get("profiles", {}).items():
        _check_profile(name, profile, path)
    return tree


def _check_names(tree: dict[str, Any], path: Path) -> None:
    sections: dict[str, set[str]] = {}
    for option in options():
        sections.setdefault(option.section, set()).add(option.name)
    for section, table in tree.items():
        if section != "profiles" and section not in sections:
            raise SettingsError(
                f"{path}: [{section}] is not a section; {did_you_mean(section, [*sections, 'profiles'])}"
            )
        if not isinstance(table, dict):
            raise SettingsError(f"{path}: {section} is {table!r}; it must be a table, [{section}]")
        for key in table if section != "profiles" else ():
            if key not in sections[section]:
                raise SettingsError(f"{path}: {section}.{key} is not a setting; {did_you_mean(key, sections[section])}")


def _check_profile(name: str, profile: object, path: Path) -> None:
    named = {"speculation": profile}
    try:
        check_profile_name(name)
        msgspec.convert(named, EngineSettings)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{path}: profiles.{name}: {explain(str(error), named, EngineSettings)}") from error
    except ApiError as error:
        raise SettingsError(f"{path}: [profiles.{name}]: {error}") from error


def _speculation(text: str, source: str) -> object:
    """A config as JSON, or a method's name alone."""
    if not text.lstrip().startswith("{"):
        return {"method": text}
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise SettingsError(f"{source} is {text!r}, which is not valid JSON: {error}") from error


def _completions(choices: Sequence[str], **_: object) -> Sequence[str]:
    return choices


ENGINE_PROGRAM = "forerun engine"
DESCRIPTIONS = {
    "forerun serve": "Serve a model over REST and WebSocket: this process answers clients, and starts the engines.",
    ENGINE_PROGRAM: "Run one engine alone: it loads the model and generates tokens, and answers no client. Fronts "
    "(`forerun serve` with the same --store) find it there, connect to --listen and send it their requests.",
}
ENGINE_SECTIONS = {"engine", "pool", "listener"}
ENGINE_SERVER_SETTINGS = {"load_seconds", "restart_seconds", "shutdown_seconds"}
"""Settings of [server] that hold for an engine alone, too."""
FRONT_POOL_SETTINGS = {
    "engines", "routing", "failover_seconds", "failover_attempts", "ray", "ray_strategy", "ray_keep",
}  # fmt: skip
"""Settings of [pool] that hold for a front alone."""


def _concerns(option: Option, program: str) -> bool:
    """Whether a setting changes anything for a program. The others are accepted, and not in its help."""
    if program == ENGINE_PROGRAM:
        is_own = option.section in ENGINE_SECTIONS and option.name not in FRONT_POOL_SETTINGS
        return is_own or option.name in ENGINE_SERVER_SETTINGS
    return option.section != "listener"


def settings_parser(program: str) -> argparse.ArgumentParser:
    """The command line of `forerun serve` and of `forerun engine`: a flag for each setting."""
    parser = argparse.ArgumentParser(
        prog=program,
        description=DESCRIPTIONS.get(program),
        epilog=f"Each flag is also a variable, {PREFIX}PORT for --port, and a line of the settings file. "
        f'"{NONE}" unsets a setting that may be unset: --eagle3 {NONE}.',
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    known = list(options())
    parser.add_argument("--config", metavar="FILE", help="settings file (TOML), with the sections below as tables")
    groups = {option.section: parser.add_argument_group(f"[{option.section}]") for option in known}
    for option in known:
        text = f"{option.description} (default: {option.shown_default})".replace("%", "%%")
        text = text if _concerns(option, program) else argparse.SUPPRESS
        add = groups[option.section].add_argument
        if isinstance(option.default, bool):
            add(option.flag, help=text, action="store_const", const="true")
        else:
            action = add(option.flag, help=text, metavar=option.metavar)
            # Read by argcomplete; argparse's own `choices` would refuse a wrong value in words of its own.
            action.completer = partial(_completions, option.choices)  # type: ignore[attr-defined]
    return parser


def _parse_flags(arguments: Sequence[str], known: Sequence[Option], program: str) -> dict[str, str]:
    found, rest = settings_parser(program).parse_known_args(list(arguments))
    for word in rest:
        name = word.partition("=")[0]
        raise SettingsError(f"{name} is not a flag; {did_you_mean(name, [option.flag for option in known])}")
    return dict(vars(found))
