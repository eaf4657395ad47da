from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from aiohttp.typedefs import Handler

from service.context import FRONT
from service.errors import ApiError
from service.experiments.handlers import EXPERIMENTS, setup
from service.experiments.manager import Experiments, Served
from service.experiments.store import MemoryExperimentStore
from service.front import Front
from service.request_handler import error_response
from service.settings import Settings
from tests.service.experiments.test_manager import drive
from tests.service.experiments.traffic import Law, body

Client = TestClient[web.Request, web.Application]


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return error_response(error)


def application() -> web.Application:
    """An application that has what reading a body needs: the front's limits, deadlines and budget."""
    app = web.Application(middlewares=[errors])
    app[FRONT] = Front(Settings())
    return app


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    app = application()
    served = Served(methods=frozenset({"none", "ngram"}), models=["m"])
    setup(app, Experiments(MemoryExperimentStore(), served=lambda: served))
    async with TestClient(TestServer(app)) as found:
        yield found


async def call(client: Client, method: str, path: str, json: Any = None, *, status: int = 200) -> Any:
    async with client.request(method, path, json=json) as response:
        assert response.status == status, await response.text()
        return await response.json() if status != 204 else None


async def test_a_profile_s_life(client: Client) -> None:
    """Put, changed, made the default, listed, refused to go while it is the default, deleted when it is not."""
    config = {"method": "ngram", "max_n": 5}
    made = await call(client, "PUT", "/v1/speculation/fast", {"speculation": config})
    assert (made["name"], made["version"], made["default"]) == ("fast", 1, False)
    assert made["speculation"]["max_n"] == 5
    changed = await call(client, "PUT", "/v1/speculation/fast", {"speculation": {"method": "none"}, "default": True})
    assert (changed["version"], changed["default"]) == (2, True)
    listed = await call(client, "GET", "/v1/speculation")
    assert (listed["default"], listed["methods"]) == ("fast", ["ngram", "none"])
    assert [profile["name"] for profile in listed["profiles"]] == ["fast"]
    await call(client, "DELETE", "/v1/speculation/fast", status=409)
    await call(client, "PUT", "/v1/speculation/slow", {"speculation": {"method": "none"}, "default": True})
    await call(client, "DELETE", "/v1/speculation/fast", status=204)
    await call(client, "GET", "/v1/speculation/fast", status=404)


@pytest.mark.parametrize(
    ("method", "path", "json", "status", "param"),
    [
        ("PUT", "/v1/speculation/fast", {"speculation": {"method": "magic"}}, 400, "speculation.method"),
        ("PUT", "/v1/speculation/fast", {"speculation": {"method": "eagle3"}}, 400, "speculation"),
        ("PUT", "/v1/speculation/fast", {"config": {}}, 400, "config"),
        ("PUT", "/v1/speculation/%3Cb%3E", {"speculation": {"method": "none"}}, 400, "name"),
        ("PUT", "/v1/speculation/none", {"speculation": {"method": "ngram"}}, 400, "name"),
        ("GET", "/v1/speculation/%0A", None, 404, "name"),
        ("POST", "/v1/experiments", {"name": "x"}, 400, "arms"),
        ("POST", "/v1/experiments?draft=maybe", body(), 400, "draft"),
        ("GET", "/v1/experiments/none", None, 404, "name"),
        ("POST", "/v1/experiments/none/stop", None, 404, "name"),
        ("POST", "/v1/experiments/none/promote", {"arm": "<x>"}, 400, "arm"),
        ("PUT", "/v1/experiments/other", body(), 400, "name"),
    ],
)
async def test_errors_have_openai_s_shape(
    client: Client, method: str, path: str, json: Any, status: int, param: str
) -> None:
    """Every mistake is answered with a message, the field's path and a code; nothing of it is echoed raw."""
    error = (await call(client, method, path, json, status=status))["error"]
    assert error["param"] == param
    assert param.rpartition(".")[2] in error["message"] or status == 404
    assert all(character.isprintable() for character in error["message"])


async def test_an_experiment_s_life(client: Client) -> None:
    """Created, seen with its report, refused a rival and a change, stopped, deleted."""
    made = await call(client, "POST", "/v1/experiments", body(filter={"model": "nobody"}), status=201)
    assert (made["status"], len(made["warnings"])) == ("running", 1)
    assert "salt" not in made
    rival = await call(client, "POST", "/v1/experiments", body(name="second"), status=409)
    assert "'lookup'" in rival["error"]["message"]
    changed = await call(client, "PUT", "/v1/experiments/lookup", body(min_samples=500), status=409)
    assert "copy" in changed["error"]["message"]
    seen = await call(client, "GET", "/v1/experiments/lookup")
    assert seen["report"]["decision"] == "collecting"
    await call(client, "DELETE", "/v1/experiments/lookup", status=409)
    stopped = await call(client, "POST", "/v1/experiments/lookup/stop")
    assert (stopped["status"], stopped["ended_because"]) == ("stopped", "stopped by hand")
    listed = await call(client, "GET", "/v1/experiments")
    assert [one["definition"]["name"] for one in listed["data"]] == ["lookup"]
    await call(client, "DELETE", "/v1/experiments/lookup", status=204)
    assert (await call(client, "GET", "/v1/experiments"))["data"] == []


async def test_a_draft_waits_and_can_be_changed(client: Client) -> None:
    """It takes no traffic until it is started."""
    await call(client, "POST", "/v1/experiments?draft=true", body(), status=201)
    await call(client, "PUT", "/v1/experiments/lookup", body(min_samples=500))
    started = await call(client, "POST", "/v1/experiments/lookup/start")
    assert (started["status"], started["definition"]["min_samples"]) == ("running", 500)


async def test_promotion_over_the_wire(client: Client) -> None:
    """Without support it is refused with the verdict, with data the winner becomes the default."""
    await call(client, "POST", "/v1/experiments", body(), status=201)
    refused = await call(client, "POST", "/v1/experiments/lookup/promote", status=409)
    assert "Collecting" in refused["error"]["message"]
    assert client.app is not None
    drive(client.app[EXPERIMENTS], Law(1, (1.0, 0.7)), 1500)
    promoted = await call(client, "POST", "/v1/experiments/lookup/promote")
    assert promoted["promotion"]["profile"] == "lookup.ngram-8"
    assert (await call(client, "GET", "/v1/speculation"))["default"] == "lookup.ngram-8"
    assert (await call(client, "GET", "/v1/experiments/lookup/trace"))["points"] == []
