"""Routes that clients of other servers ask: health, version, tokenizer, names, documents, and what is not there."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from service.event_stream import COMMENT
from service.pool.settings import TenantSettings
from service.settings import LimitSettings, ServerSettings
from tests.service.conftest import Service, StartService

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = {"role": "user", "content": "hi"}


async def test_health_has_the_names_of_other_servers(start_service: StartService) -> None:
    """`/health`, `/v1/health` and `/ping` say what `/health/ready` says, before and after the engine serves."""
    service = await start_service(wait=False)
    paths = ("/health/ready", "/health", "/v1/health", "/ping")
    before = {(await service.get(path))[0] for path in paths}
    assert before in ({503}, {200}, {200, 503})
    await service.until(lambda: service.front.is_ready)
    assert {(await service.get(path))[0] for path in paths} == {200}
    assert (await service.post("/ping", {}))[0] == 200


async def test_the_version_is_that_of_the_distribution(service: Service) -> None:
    """`GET /version` has vLLM's shape."""
    assert await service.get("/version") == (200, {"version": metadata.version("forerun")})


async def test_a_model_has_several_names_in_any_case(start_service: StartService) -> None:
    """Every name of `--model-name` is listed and accepted; responses have the first; others are 404 that name them."""
    service = await start_service(server=ServerSettings(model_name="Small-Model, gpt-4o-mini"))
    _, listed = await service.get("/v1/models")
    assert [entry["id"] for entry in listed["data"]] == ["Small-Model", "gpt-4o-mini"]
    for name in ("Small-Model", "small-model", "GPT-4o-mini", "default", None):
        status, answer = await service.post(CHAT, {"model": name, "messages": [USER]})
        assert (status, answer["model"]) == (200, "Small-Model")
    assert (await service.get("/v1/models/GPT-4O-MINI"))[1]["id"] == "gpt-4o-mini"
    status, answer = await service.post(CHAT, {"model": "gpt-4", "messages": [USER]})
    assert status == 404
    assert "'Small-Model' or 'gpt-4o-mini'" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("POST", "/v1/responses", "Responses API is not served; use POST /v1/chat/completions"),
        ("GET", "/v1/responses/resp_1", "Responses API"),
        ("POST", "/v1/embeddings", "only text is generated"),
        ("POST", "/v1/messages", "Anthropic"),
        ("GET", "/api/tags", "Ollama"),
        ("POST", "/completion", "llama.cpp"),
        ("POST", "/v1/v1/chat/completions", "/v1 twice"),
        ("POST", "/chat/completions", "must end with /v1"),
        ("GET", "/models", "must end with /v1"),
        ("GET", "/nothing", "GET /docs lists the routes"),
        ("GET", "/apiary", "GET /docs lists the routes"),
    ],
)
async def test_known_paths_that_are_not_served_say_what_to_use(
    service: Service, method: str, path: str, words: str
) -> None:
    """A 404 of a route that another server has is a sentence that leads on."""
    async with service.client.request(method, service.url + path, data=b"{}") as response:
        error = json.loads(await response.read())["error"]
    assert (response.status, error["code"]) == (404, "unknown_url")
    assert words in error["message"]


async def test_texts_are_tokenized_and_back(service: Service) -> None:
    """`/tokenize` and `/detokenize` have vLLM's shapes, and are inverse to each other."""
    status, answer = await service.post("/tokenize", {"prompt": "The quick<|im_end|>", "return_token_strs": True})
    assert status == 200
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 256
    assert answer["tokens"][-1] == 2
    assert "".join(answer["token_strs"]) == "The quick<|im_end|>"
    assert await service.post("/detokenize", {"tokens": answer["tokens"]}) == (200, {"prompt": "The quick<|im_end|>"})
    _, plain = await service.post("/tokenize", {"prompt": "The quick<|im_end|>", "parse_special": False})
    assert 2 not in plain["tokens"]


async def test_a_conversation_has_as_many_tokens_as_its_prompt(service: Service) -> None:
    """`/tokenize` of messages gives the prompt's token ids, as a request for an answer counts them."""
    messages = [{"role": "system", "content": "Be <|im_end|> brief."}, USER]
    _, answer = await service.post("/tokenize", {"messages": messages})
    _, chat = await service.post(CHAT, {"messages": messages, "max_tokens": 1})
    assert answer["count"] == chat["usage"]["prompt_tokens"]
    assert answer["token_strs"] is None


async def test_large_texts_are_tokenized(start_service: StartService) -> None:
    """A text of several times the context is counted, in the process for large requests."""
    service = await start_service(limits=LimitSettings(max_body_bytes=10**6))
    status, answer = await service.post("/tokenize", {"prompt": "The quick " * 20_000})
    assert status == 200
    assert answer["count"] > 20_000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [USER]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/detokenize", {"tokens": [512]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
async def test_bad_input_of_the_tokenizer_routes_is_named(
    service: Service, path: str, body: dict[str, Any], param: str
) -> None:
    """A wrong field is a 4xx that names it."""
    status, answer = await service.post(path, body)
    assert 400 <= status < 500
    assert answer["error"]["param"] == param


async def test_the_tokenizer_s_configuration_is_shown(service: Service) -> None:
    """`/tokenizer_info` has the special tokens as texts and the chat template, as evaluation tools want them."""
    status, info = await service.get("/tokenizer_info")
    assert status == 200
    assert (info["bos_token"], info["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert "message['role']" in info["chat_template"]
    assert info["tokenizer_class"]


async def test_keys_hold_on_every_route_but_the_public_ones(start_service: StartService, tmp_path: Path) -> None:
    """With API keys, the tokenizer's routes need one; probes, metrics, documents and the page's files do not."""
    keys = tmp_path / "keys"
    keys.write_text("someone secret\n")
    service = await start_service(tenants=TenantSettings(api_keys_file=str(keys)))
    headers = {"Authorization": "Bearer secret"}
    for path in ("/tokenize", "/detokenize"):
        body: dict[str, Any] = {"prompt": "hi", "tokens": [5]}
        assert (await service.post(path, body))[0] == 401
        assert (await service.post(path, body, headers=headers))[0] == 200
    assert (await service.get("/tokenizer_info"))[0] == 401
    assert (await service.get("/tokenizer_info", headers=headers))[0] == 200
    for path in ("/", "/health", "/ping", "/version", "/metrics", "/docs/api", "/page/style.css"):
        assert (await service.get(path))[0] == 200
    assert (await service.get("/nothing"))[0] == 404


async def test_the_service_shows_its_own_documents(service: Service) -> None:
    """`/docs` leads to the API's document: a page with anchors, whose links lead to pages that are there."""
    async with service.client.get(f"{service.url}/docs") as response:
        text = await response.text()
        assert (response.status, response.url.path, response.content_type) == (200, "/docs/api", "text/html")
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]
    assert '<h2 id="requests">' in text
    assert "<table>" in text
    for target in set(re.findall(r'href="([^"#:]+)', text)):
        async with service.client.get(f"{service.url}/docs/{target}") as response:
            assert response.status == 200, target
    assert (await service.get("/docs/nothing"))[0] == 404


async def test_a_refused_request_s_line_says_why(start_service: StartService, tmp_path: Path) -> None:
    """The log line of a 4xx has status, code, field, client address and tenant."""
    keys = tmp_path / "keys"
    keys.write_text("someone secret\n")
    service = await start_service(tenants=TenantSettings(api_keys_file=str(keys)))
    with capture_logs() as logs:
        await service.post(CHAT, {"messages": [USER], "temperature": 9}, headers={"Authorization": "Bearer secret"})
        await service.post(CHAT, {"messages": [USER]})
        await service.get("/v1/engines", headers={"Authorization": "Bearer secret"})
    wrong, keyless, forbidden = [entry for entry in logs if entry["event"] == "request"]
    assert (wrong["status"], wrong["code"], wrong["param"]) == (400, "invalid_value", "temperature")
    assert (wrong["client"], wrong["tenant"]) == ("127.0.0.1", "someone")
    assert (keyless["status"], keyless["code"], "tenant" in keyless) == (401, "invalid_api_key", False)
    assert (forbidden["status"], forbidden["code"], forbidden["tenant"]) == (403, "operators_only", "someone")


@pytest.mark.parametrize("access_log", [False, True])
async def test_the_access_log_has_a_line_for_probes_too(start_service: StartService, access_log: bool) -> None:
    """With `--access-log` every request has a line; without it those of probes are left out while they succeed."""
    service = await start_service(server=ServerSettings(access_log=access_log))
    with capture_logs() as logs:
        await service.get("/health")
        await service.get("/v1/models")
    lines = [entry["path"] for entry in logs if entry["event"] == "request" and entry["log_level"] == "info"]
    assert lines == (["/health", "/v1/models"] if access_log else ["/v1/models"])


async def test_a_method_that_is_not_there_says_what_it_needs(service: Service) -> None:
    """Methods without their weights, by name and as an object, name the flag; `first` shows an object."""
    for wanted, need in (
        ("medusa", "--medusa DIR"),
        ("eagle3", "--eagle3 DIR"),
        ("draft_model", "--draft-model"),
        ("first", '"proposers"'),
        ({"method": "medusa"}, "--medusa DIR"),
        ({"method": "first", "proposers": [{"method": "ngram"}, {"method": "eagle3"}]}, "--eagle3 DIR"),
    ):
        status, answer = await service.post(CHAT, {"messages": [USER], "speculation": wanted})
        assert status == 400
        assert need in answer["error"]["message"]


async def put(service: Service, name: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with service.client.put(f"{service.url}/v1/speculation/{name}", json=body) as response:
        return response.status, await response.json()


async def test_a_profile_takes_what_a_request_takes(service: Service) -> None:
    """PUT takes a config, a method's name or another profile's; unknown names are errors."""
    assert (await put(service, "one", {"speculation": "ngram"}))[1]["speculation"]["method"] == "ngram"
    assert (await put(service, "two", {"speculation": "fast"}))[1]["speculation"]["num_speculative_tokens"] == 2
    status, answer = await put(service, "three", {"speculation": "medusa"})
    assert (status, "--medusa" in answer["error"]["message"]) == (400, True)
    assert (await put(service, "three", {"speculation": "nothing"}))[0] == 400


async def test_a_default_profile_can_be_unmade(service: Service) -> None:
    """`default: false` takes it away: the answer and the list say so, and the engine's own config holds again."""
    assert (await put(service, "mine", {"speculation": "ngram", "default": True}))[1]["default"] is True
    assert (await put(service, "mine", {"speculation": "none"}))[1]["default"] is True
    assert (await service.get("/v1/speculation"))[1]["default"] == "mine"
    assert (await put(service, "mine", {"speculation": "none", "default": False}))[1]["default"] is False
    assert (await service.get("/v1/speculation"))[1]["default"] is None
    assert service.front.experiments.default is None
    async with service.client.delete(f"{service.url}/v1/speculation/mine") as response:
        assert response.status == 204


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams begin after 50 ms without a token, and send a comment after 50 ms of silence."""
    monkeypatch.setattr("service.event_stream.OPENING_SECONDS", 0.05)
    monkeypatch.setattr("service.event_stream.KEEP_ALIVE_SECONDS", 0.05)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": [USER], "n": 2}), (TEXT, {"prompt": "hi"})])
async def test_a_stream_begins_before_its_first_token(service: Service, path: str, body: dict[str, Any]) -> None:
    """While the engine is silent, headers, the role chunk and comments come; the answer follows, and the role once."""
    pid = service.supervisor.pid
    assert pid is not None
    request = {**body, "stream": True, "max_tokens": 5, "ignore_eos": True}
    os.kill(pid, signal.SIGSTOP)
    try:
        async with service.client.post(service.url + path, json=request) as response:
            assert response.status == 200
            text = b""
            async with asyncio.timeout(10):
                while text.count(COMMENT) < 2:
                    text += await response.content.readany()
            assert text.count(b"role") == (2 if path == CHAT else 0)
            os.kill(pid, signal.SIGCONT)
            text += await response.content.read()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert text.endswith(b"data: [DONE]\n\n")
    assert text.count(b"role") == (2 if path == CHAT else 0)


@pytest.mark.usefixtures("impatient")
async def test_what_is_refused_before_a_token_is_a_status(service: Service) -> None:
    """Errors that are known before the stream begins are statuses of their own."""
    body = {"prompt": "hi", "stream": True}
    assert (await service.post(TEXT, {**body, "cache_salt": "refuse"}))[0] == 429
    assert (await service.post(TEXT, {**body, "temperature": 9}))[0] == 400
