"""The routes of profiles and experiments, and how an application gets them: `setup(app, experiments)`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
from aiohttp import web

from service.bodies import read_body
from service.errors import ApiError
from service.experiments.manager import Experiments
from service.experiments.model import Experiment, Profile
from service.experiments.report import Report
from service.experiments.validation import check_name, parse_definition
from service.service_routes import json_response
from service.speculation_names import named_config
from service.validation import parse_body
from speculation.messages import SpeculationConfig

EXPERIMENTS = web.AppKey("experiments", Experiments)


class ProfileBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of PUT /v1/speculation/{name}."""

    speculation: SpeculationConfig | str
    """A config, or the name of a profile or a method."""
    default: bool | None = None
    """True makes it the config of requests that ask for none, false ends that; null leaves the default as it is."""


class PromoteBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/experiments/{name}/promote; it may be left out."""

    arm: str | None = None
    """Without it the arm that the data support, if there is one."""


class ProfileView(msgspec.Struct, frozen=True, kw_only=True):
    """A profile as it is shown."""

    name: str
    version: int
    speculation: SpeculationConfig
    updated_at: float
    default: bool


class ProfileList(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of GET /v1/speculation."""

    default: str | None
    """Name of the default profile; null is the engine's own config."""
    methods: list[str]
    profiles: list[ProfileView]
    unreadable: dict[str, str] = {}
    """Documents in the store that this version cannot read, each with the reason; absent if there is none."""


def setup(app: web.Application, experiments: Experiments) -> None:
    """Add the routes, and keep the experiments running while the application does."""
    app[EXPERIMENTS] = experiments
    app.cleanup_ctx.append(_running)
    app.add_routes(
        [
            web.get("/v1/speculation", list_profiles),
            web.get("/v1/speculation/{name}", get_profile),
            web.put("/v1/speculation/{name}", put_profile),
            web.delete("/v1/speculation/{name}", delete_profile),
            web.get("/v1/experiments", list_experiments),
            web.post("/v1/experiments", create_experiment),
            web.get("/v1/experiments/{name}", get_experiment),
            web.put("/v1/experiments/{name}", change_experiment),
            web.delete("/v1/experiments/{name}", delete_experiment),
            web.get("/v1/experiments/{name}/trace", get_trace),
            web.post("/v1/experiments/{name}/start", start_experiment),
            web.post("/v1/experiments/{name}/stop", stop_experiment),
            web.post("/v1/experiments/{name}/promote", promote_experiment),
        ]
    )


async def list_profiles(request: web.Request) -> web.Response:
    experiments = request.app[EXPERIMENTS]
    book = await experiments.refresh()
    profiles = [_profile_view(profile, book.default) for _, profile in sorted(book.profiles.items())]
    return json_response(
        ProfileList(
            default=book.default,
            methods=sorted(experiments.served.methods),
            profiles=profiles,
            unreadable=book.unreadable,
        )
    )


async def get_profile(request: web.Request) -> web.Response:
    book = await request.app[EXPERIMENTS].refresh()
    return json_response(_profile_view(book.profile(request.match_info["name"]), book.default))


async def put_profile(request: web.Request) -> web.Response:
    experiments = request.app[EXPERIMENTS]
    body = parse_body(await read_body(request), ProfileBody)
    config = body.speculation
    if isinstance(config, str):
        config = named_config(config, experiments.configs, experiments.served.methods)
    profile = await experiments.put_profile(request.match_info["name"], config, is_default=body.default)
    return json_response(_profile_view(profile, experiments.book.default))


async def delete_profile(request: web.Request) -> web.Response:
    await request.app[EXPERIMENTS].delete_profile(request.match_info["name"])
    return web.Response(status=204)


async def list_experiments(request: web.Request) -> web.Response:
    book = await request.app[EXPERIMENTS].refresh()
    newest_first = sorted(book.experiments.values(), key=lambda one: one.created_at, reverse=True)
    listed = {"object": "list", "data": [experiment_view(experiment) for experiment in newest_first]}
    return json_response(listed | ({"unreadable": book.unreadable} if book.unreadable else {}))


async def create_experiment(request: web.Request) -> web.Response:
    definition = parse_definition(await read_body(request))
    experiment = await request.app[EXPERIMENTS].create(definition, is_draft=_flag(request, "draft"))
    return json_response(experiment_view(experiment), status=201)


async def change_experiment(request: web.Request) -> web.Response:
    """A draft can be replaced; anything else has been seen by somebody already."""
    definition = parse_definition(await read_body(request))
    if definition.name != request.match_info["name"]:
        raise ApiError.invalid("name", f"name is {definition.name!r}; it must be the one in the address")
    return json_response(experiment_view(await request.app[EXPERIMENTS].replace(definition)))


async def get_experiment(request: web.Request) -> web.Response:
    """The experiment and its report."""
    experiments, name = request.app[EXPERIMENTS], request.match_info["name"]
    report = await experiments.report(name)
    return json_response(experiment_view(experiments.book.experiment(name), report))


async def get_trace(request: web.Request) -> web.Response:
    return json_response(await request.app[EXPERIMENTS].trace(request.match_info["name"]))


async def delete_experiment(request: web.Request) -> web.Response:
    await request.app[EXPERIMENTS].delete(request.match_info["name"])
    return web.Response(status=204)


async def start_experiment(request: web.Request) -> web.Response:
    return json_response(experiment_view(await request.app[EXPERIMENTS].start(request.match_info["name"])))


async def stop_experiment(request: web.Request) -> web.Response:
    return json_response(experiment_view(await request.app[EXPERIMENTS].stop(request.match_info["name"])))


async def promote_experiment(request: web.Request) -> web.Response:
    data = await read_body(request)
    body = parse_body(data, PromoteBody) if data else PromoteBody()
    arm = None if body.arm is None else check_name(body.arm, "arm")
    return json_response(experiment_view(await request.app[EXPERIMENTS].promote(request.match_info["name"], arm)))


def experiment_view(experiment: Experiment, report: Report | None = None) -> dict[str, Any]:
    """An experiment as it is shown. Its salt stays here: who knows it could choose an arm."""
    view: dict[str, Any] = msgspec.to_builtins(experiment)
    del view["salt"]
    return view | ({} if report is None else {"report": msgspec.to_builtins(report)})


def _profile_view(profile: Profile, default: str | None) -> ProfileView:
    return ProfileView(
        name=profile.name,
        version=profile.version,
        speculation=profile.speculation,
        updated_at=profile.updated_at,
        default=profile.name == default,
    )


def _flag(request: web.Request, name: str) -> bool:
    value = request.query.get(name, "false")
    if value not in {"true", "false"}:
        raise ApiError.invalid(name, f"{name} is {value[:20]!a}; it must be true or false")
    return value == "true"


async def _running(app: web.Application) -> AsyncIterator[None]:
    async with app[EXPERIMENTS].running():
        yield
