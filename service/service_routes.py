"""The routes that say what is served and how it is: models, health, metrics."""

from __future__ import annotations

from importlib import metadata

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from service.context import FRONT
from service.responses import Model, ModelList
from service.served_model import ServedModel


class Health(msgspec.Struct, frozen=True):
    """The body of the health routes."""

    status: str


def json_response(body: object, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


async def models(request: web.Request) -> web.Response:
    served = request.app[FRONT].model
    return json_response(ModelList(data=[describe(served, name) for name in served.names]))


async def model(request: web.Request) -> web.Response:
    served, asked = request.app[FRONT].model, request.match_info["name"]
    served.check_name(asked)
    names = {name.lower(): name for name in served.names}
    return json_response(describe(served, names.get(asked.lower(), served.name)))


async def live(_: web.Request) -> web.Response:
    return json_response(Health("live"))


async def ready(request: web.Request) -> web.Response:
    front = request.app[FRONT]
    if front.is_ready:
        return json_response(Health("ready"))
    return json_response(Health("shutting down" if front.admission.is_draining else "engine not ready"), status=503)


async def version(_: web.Request) -> web.Response:
    return json_response({"version": metadata.version("forerun")})


async def metrics(request: web.Request) -> web.Response:
    return web.Response(body=request.app[FRONT].metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})


def describe(served: ServedModel, name: str) -> Model:
    """An entry of the models' list."""
    return Model(
        id=name,
        created=served.created,
        max_model_len=served.context_length,
        description=served.ready.description,
        sampling_defaults=served.sampling,
    )
