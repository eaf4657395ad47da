"""Experiments over HTTP and WebSocket, in a whole service with a scripted engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from tests.service.conftest import Service
from tests.service.experiments.traffic import NGRAM, PLAIN, body

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
HI = {"prompt": "The quick brown fox", "max_tokens": 9, "ignore_eos": True}
SLOW = HI | {"cache_salt": "slow"}


async def create(service: Service, **changes: Any) -> None:
    status, answer = await service.post("/v1/experiments", body(**changes))
    assert status == 201, answer


async def ask(
    service: Service, request: dict[str, Any], path: str = TEXT, **headers: str
) -> tuple[dict[str, str], Any]:
    """The experiment headers and the body of an answer."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with service.client.post(f"{service.url}{path}", json=request, headers=named) as response:
        text = await response.text()
        seen = {name: value for name, value in response.headers.items() if name.startswith("X-Forerun-")}
        return seen, json.loads(text) if response.content_type == "application/json" else text


async def report(service: Service, name: str = "lookup") -> Any:
    status, seen = await service.get(f"/v1/experiments/{name}")
    assert status == 200
    return seen["report"]


def counted(seen: Any, what: str) -> int:
    return int(sum(arm[what] for arm in seen["arms"]))


async def test_an_answer_names_its_arm_and_was_given_it(service: Service) -> None:
    """Whole or streamed, chat or text: headers name experiment and arm, and the arm's config is the one that ran."""
    await create(service)
    arms = set()
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    for _ in range(6):
        for path, request in ((TEXT, HI), (CHAT, chat)):
            seen, answer = await ask(service, request, path)
            assert seen["X-Forerun-Experiment"] == "lookup"
            guesses = answer["metrics"]["speculative_decoding"]["num_spec_steps"] > 0
            assert guesses == (seen["X-Forerun-Arm"] == "ngram-8")
            arms.add(seen["X-Forerun-Arm"])
            seen, _ = await ask(service, request | {"stream": True}, path)
            assert seen["X-Forerun-Arm"] in {"plain", "ngram-8"}
    assert arms == {"plain", "ngram-8"}
    assert counted(await report(service), "finished") == 24


async def test_the_socket_names_the_arm(service: Service) -> None:
    """`started` has experiment and arm; a generation that is cancelled counts as aborted, not as finished."""
    await create(service)
    async with service.client.ws_connect(f"{service.url}/v1/stream") as socket:
        await socket.send_json({"type": "generate", "id": "a", "request": HI})
        started = json.loads(await socket.receive_str())
        assert (started["type"], started["experiment"]) == ("started", "lookup")
        assert started["arm"] in {"plain", "ngram-8"}
        while json.loads(await socket.receive_str())["type"] != "finished":
            pass
        await socket.send_json({"type": "generate", "id": "b", "request": SLOW | {"max_tokens": 200}})
        await socket.send_json({"type": "cancel", "id": "b"})
        while json.loads(await socket.receive_str())["type"] != "finished":
            pass
    seen = await report(service)
    assert (counted(seen, "finished"), counted(seen, "aborted")) == (1, 1)


async def test_without_an_experiment_nothing_is_said(service: Service) -> None:
    """No headers, and no fields in `started`, for requests outside; and none after an experiment was stopped."""
    assert (await ask(service, HI))[0] == {}
    await create(service)
    assert (await ask(service, HI | {"speculation": "fast"}))[0] == {}
    assert (await ask(service, HI))[0]
    status, stopped = await service.post("/v1/experiments/lookup/stop", b"")
    assert (status, stopped["status"]) == (200, "stopped")
    assert (await ask(service, HI))[0] == {}
    async with service.client.ws_connect(f"{service.url}/v1/stream") as socket:
        await socket.send_json({"type": "generate", "id": "a", "request": HI})
        assert "experiment" not in json.loads(await socket.receive_str())


@pytest.mark.parametrize("unit", ["user", "header:X-Session"])
async def test_a_unit_stays_with_its_arm(service: Service, unit: str) -> None:
    """Each of thirty users, or sessions, gets one arm every time; a request without one stays out."""
    await create(service, unit=unit)
    arms: dict[str, set[str]] = {}
    for number in range(60):
        who = f"somebody-{number % 30}"
        request = HI | {"max_tokens": 1} | ({"user": who} if unit == "user" else {})
        seen, _ = await ask(service, request, **({} if unit == "user" else {"x_session": who}))
        arms.setdefault(who, set()).add(seen["X-Forerun-Arm"])
    assert [len(each) for each in arms.values()] == [1] * 30
    assert len(set.union(*arms.values())) == 2
    assert (await ask(service, HI))[0] == {}


async def test_a_filter_chooses_by_route_header_and_prompt(service: Service) -> None:
    """Only requests that satisfy all of it take part."""
    header = {"name": "X-Team", "value": "search"}
    await create(service, filter={"route": TEXT, "header": header, "min_prompt_tokens": 3})
    chat = {"messages": [{"role": "user", "content": "The quick brown fox"}], "max_tokens": 2}
    assert (await ask(service, HI, x_team="search"))[0]
    assert not (await ask(service, HI, x_team="other"))[0]
    assert not (await ask(service, HI | {"prompt": [5]}, x_team="search"))[0]
    assert not (await ask(service, chat, CHAT, x_team="search"))[0]


async def test_failures_and_departures_are_told_apart(service: Service) -> None:
    """What the engine refuses counts as failed, a client that leaves as aborted, a client's own mistake not at all."""
    await create(service)
    await ask(service, HI | {"cache_salt": "refuse"})
    await ask(service, HI | {"cache_salt": "invalid"})
    with pytest.raises((TimeoutError, aiohttp.ClientError)):
        await service.post(TEXT, SLOW | {"max_tokens": 200}, timeout=aiohttp.ClientTimeout(total=0.3))
    await service.until_idle()
    await ask(service, HI)
    seen = await report(service)
    assert [counted(seen, what) for what in ("failed", "aborted", "finished")] == [1, 1, 1]


async def test_the_winner_is_promoted_by_itself(service: Service) -> None:
    """Three tokens a step against one: ngram wins, becomes the default within its cool-down, and serves the next."""
    await create(service, min_samples=40, at_end={"action": "promote", "holdback": 0.01})

    async def has_ended() -> bool:
        return bool((await service.get("/v1/experiments/lookup"))[1]["status"] != "running")

    async with asyncio.timeout(60):
        while not await has_ended():
            await asyncio.gather(*(ask(service, SLOW) for _ in range(8)))
    _, seen = await service.get("/v1/experiments/lookup")
    assert (seen["status"], seen["promotion"]["profile"]) == ("promoted", "lookup.ngram-8")
    assert not seen["promotion"]["by_hand"]
    assert (await service.get("/v1/speculation"))[1]["default"] == "lookup.ngram-8"
    await service.post("/v1/experiments/lookup/stop", b"")
    headers, answer = await ask(service, HI)
    assert headers == {}
    assert answer["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


async def test_a_default_profile_is_what_requests_without_a_wish_get(service: Service) -> None:
    """From the next request on; a request's own wish comes first."""
    for method, guesses in (("none", False), ("ngram", True)):
        change = {"speculation": {"method": method}, "default": True}
        async with service.client.put(f"{service.url}/v1/speculation/house", json=change) as response:
            assert response.status == 200
        _, answer = await ask(service, HI)
        assert (answer["metrics"]["speculative_decoding"]["num_spec_steps"] > 0) == guesses
    _, answer = await ask(service, HI | {"speculation": "none"})
    assert answer["metrics"]["speculative_decoding"]["num_spec_steps"] == 0
    _, answer = await ask(service, HI | {"speculation": "house"})
    assert answer["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


def weighed(*weights: float) -> list[dict[str, Any]]:
    return [arm | {"weight": weight} for arm, weight in zip((PLAIN, NGRAM), weights, strict=True)]


@pytest.mark.parametrize(
    ("changes", "param", "part"),
    [
        ({"arms": weighed(0.5, 0.6)}, "arms", "must sum to 1"),
        ({"arms": [PLAIN]}, "arms", "2"),
        ({"arms": [PLAIN, PLAIN]}, "arms[1].name", "plain"),
        ({"arms": [PLAIN, {"name": "x", "profile": "fsat"}]}, "arms[1].profile", "'fast'"),
        ({"arms": [PLAIN, {"name": "x", "speculation": {"method": "eagle3"}}]}, "arms[1].speculation", "not served"),
        ({"guardrails": [{"metric": "happiness", "limit": 1}]}, "guardrails[0].metric", "ttft"),
        ({"name": "<script>alert(1)</script>"}, "name", "letters"),
        ({"hypothesis": "\x1b[31mred"}, "hypothesis", "control"),
        ({"arms": [PLAIN, NGRAM | {"name": "a\u202eb"}]}, "arms[1].name", "letters"),
        ({"unit": "header:Authorization\r\nX: y"}, "unit", "header:NAME"),
    ],
)
async def test_bad_definitions_are_refused(service: Service, changes: dict[str, Any], param: str, part: str) -> None:
    """With the field, what is wrong and what is right, and nothing of the input that a terminal or page would run."""
    status, answer = await service.post("/v1/experiments", body(**changes))
    assert (status, answer["error"]["param"]) == (400, param)
    assert part in answer["error"]["message"]
    assert answer["error"]["message"].isprintable()


async def test_a_second_experiment_on_the_same_traffic_is_refused(service: Service) -> None:
    """It names the first; a change of what runs is refused, too; a filter that matches nothing is only warned of."""
    await create(service)
    status, answer = await service.post("/v1/experiments", body(name="second"))
    assert status == 409
    assert "'lookup'" in answer["error"]["message"]
    async with service.client.put(f"{service.url}/v1/experiments/lookup", json=body(min_samples=999)) as response:
        assert response.status == 409
    await service.post("/v1/experiments/lookup/stop", b"")
    status, made = await service.post("/v1/experiments", body(name="third", filter={"model": "nobody"}))
    assert status == 201
    assert "nobody" in made["warnings"][0]


async def test_many_units_take_bounded_room(service: Service) -> None:
    """Hundreds of header values, some of them hostile, leave at most 512 buckets, and nothing of what they said."""
    await create(service, unit="header:X-Session")
    values = [f"<b>{number}</b>;drop table" for number in range(700)]
    for first in range(0, 700, 50):
        asked = (ask(service, HI | {"max_tokens": 2}, x_session=value) for value in values[first : first + 50])
        await asyncio.gather(*asked)
    seen = await report(service)
    assert counted(seen, "finished") == 700
    experiments = service.front.experiments
    key = experiments.book.experiments["lookup"].tally_key
    tally = await experiments._store.tally(key)
    assert len({name.split(".")[1] for name in tally.sums if name.startswith("b.")}) <= 512
    assert "<b>" not in json.dumps(seen)
    assert not any("<" in name for name in tally.sums)
