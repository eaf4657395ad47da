"""Numbers, names and bodies at their extremes: each is served, or refused with a short 4xx that says what is right."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from service.errors import MAX_MESSAGE_BYTES, ApiError, did_you_mean, shorten
from service.experiments.model import Definition
from service.experiments.validation import parse_definition
from service.schema import ChatCompletionRequest, CompletionRequest
from service.settings import LimitSettings, ServerSettings
from service.validation import parse_body
from tests.service.conftest import Service, StartService

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
EXTREME_INTEGERS = (2**31, 2**53, 2**61, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**70, -(2**31), -(2**63) - 1, -(2**70))
EXTREME_NUMBERS = (
    "1e308",
    "-1e308",
    "1e309",
    "-1e309",
    "1e999",
    "NaN",
    "Infinity",
    "-Infinity",
    "1" * 400,
    "-0.0",
    "5e-324",
)
NUMBER_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "n", "max_tokens", "min_tokens", "priority", "logprobs", "best_of",
)  # fmt: skip
NESTED_NUMBERS = (
    '"logit_bias": {"5": %s}',
    '"stop_token_ids": [%s]',
    '"speculation": {"method": "ngram", "num_speculative_tokens": %s}',
    '"speculation": {"method": "ngram", "max_n": %s}',
    '"speculation": {"method": "suffix", "tree_size": %s}',
    '"speculation": {"method": "suffix", "length_factor": %s}',
    '"speculation": {"method": "suffix", "min_confidence": %s}',
    '"prompt": [%s]',
    '"prompt": [[5, %s]]',
)
LONG = "x" * 1_000_000


@pytest.mark.parametrize("number", [*map(str, EXTREME_INTEGERS), *EXTREME_NUMBERS, "9" * 4300, "9" * 4301, "0" * 9])
async def test_no_number_of_a_client_is_a_mistake_of_ours(service: Service, number: str) -> None:
    """Each number in each place of a request is served or refused with a 4xx, and every sequence ends."""
    places = [f'"{name}": %s' for name in NUMBER_FIELDS] + list(NESTED_NUMBERS)
    for place in places:
        body = '{"prompt": "hi", ' + place % number + "}" if '"prompt"' not in place else "{" + place % number + "}"
        status, answer = await service.post(TEXT, body.encode())
        assert status in {200, 400, 429}, (body[:300], answer)
        assert status == 200 or len(json.dumps(answer)) < 2000
    await service.until_idle()


@pytest.mark.parametrize("top_k", [-1, 0, 512, 2**61, 2**63 - 1])
async def test_a_top_k_above_the_vocabulary_is_served(service: Service, top_k: int) -> None:
    """It means every token, as in other services, up to the largest integer that can be sent on."""
    assert (await service.post(TEXT, {"prompt": "hi", "top_k": top_k}))[0] == 200


@pytest.mark.parametrize("top_k", [2**63, 2**64, 10**400, -2])
async def test_a_top_k_that_is_no_count_is_refused(service: Service, top_k: int) -> None:
    """The error names the field, the value and what is right."""
    status, body = await service.post(TEXT, {"prompt": "hi", "top_k": top_k})
    assert (status, body["error"]["param"]) == (400, "top_k")
    assert str(top_k)[:20] in body["error"]["message"]
    assert "9223372036854775807" in body["error"]["message"] or ">= -1" in body["error"]["message"]


def test_a_huge_integer_is_named() -> None:
    """An integer that is too long to be converted is refused with its place and its length."""
    with pytest.raises(ApiError, match="stop_token_ids\\[1\\] is an integer of 5000 digits") as caught:
        parse_body(b'{"prompt": "a", "stop_token_ids": [1, %s]}' % (b"7" * 5000), CompletionRequest)
    assert caught.value.body.param == "stop_token_ids[1]"


@pytest.mark.parametrize("number", [2**53, -(2**53), 2**70])
def test_integers_for_a_template_are_bounded(number: int) -> None:
    """A template variable is no larger than what every JSON client sends unchanged."""
    tree = {"messages": MESSAGES, "chat_template_kwargs": {"x": number}}
    with pytest.raises(ApiError, match="chat_template_kwargs"):
        parse_body(json.dumps(tree).encode(), ChatCompletionRequest)
    tree["chat_template_kwargs"] = {"x": 2**53 - 1, "y": -1.5, "z": None, "text": "a", "is_set": True}
    assert (
        parse_body(json.dumps(tree).encode(), ChatCompletionRequest).chat_template_kwargs
        == tree["chat_template_kwargs"]
    )


@pytest.mark.parametrize(
    "key", ["", " 7", "7 ", "+7", "-0", "7_0", "0x7", "7.0", "٣", "７", "1" * 5000, "0" * 5000, "512"]
)
async def test_keys_of_a_bias_are_token_ids(service: Service, key: str) -> None:
    """A key is ASCII digits alone, within the vocabulary, and of bounded length."""
    status, body = await service.post(TEXT, {"prompt": "hi", "logit_bias": {key: 1}})
    assert (status, body["error"]["param"]) == (400, "logit_bias")
    assert "0 to 511" in body["error"]["message"]
    assert len(body["error"]["message"]) < 300


async def test_a_token_id_is_biased_once(service: Service) -> None:
    """Leading zeros are no second name for a token id: two keys that mean the same are refused."""
    assert (await service.post(TEXT, {"prompt": "hi", "logit_bias": {"07": 1}}))[0] == 200
    status, body = await service.post(TEXT, {"prompt": "hi", "logit_bias": {"7": 1, "07": 2}})
    assert status == 400
    assert "token id 7 twice" in body["error"]["message"]


NUMBERS_OF_EXPERIMENTS = (
    {"min_samples": 0}, {"max_samples": 0}, {"significance": 0}, {"expected_effect": 0},
    {"arms": [{"name": "a", "speculation": {"method": "none"}, "weight": 0}, {"name": "b", "profile": "x"}]},
    {"filter": {"min_prompt_tokens": 0}}, {"filter": {"max_prompt_tokens": 0}},
    {"guardrails": [{"metric": "tpot", "limit": 0}]}, {"guardrails": [{"metric": "tpot", "max_worsening": 0}]},
    {"allocation": {"kind": "adaptive", "floor": 0}}, {"allocation": {"kind": "switchback", "slot_seconds": 0}},
    {"allocation": {"kind": "switchback", "washout_seconds": 0}},
    {"at_end": {"action": "promote", "cool_down_seconds": 0}}, {"at_end": {"action": "promote", "holdback": 0}},
)  # fmt: skip


@pytest.mark.parametrize("fields", NUMBERS_OF_EXPERIMENTS, ids=str)
def test_numbers_of_an_experiment_are_bounded(fields: dict[str, Any]) -> None:
    """A definition that is accepted can be stored: every number of it has a bound that fits in a document."""
    arms = [{"name": name, "speculation": {"method": "none"}} for name in "ab"]
    text = json.dumps({"name": "x", "arms": arms, **fields})
    for number in (*map(str, EXTREME_INTEGERS), "1e308", "-1e308", "1e999", "NaN"):
        with suppress(ApiError):  # a refusal; what is accepted must be stored and read again
            definition = parse_definition(text.replace(": 0", f": {number}").encode())
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(definition), type=Definition) == definition
            assert abs(float(number)) < 1e12


def encoded_bodies() -> list[tuple[str, bytes]]:
    """Bodies that are not what their `Content-Encoding` says: other bytes, and a wrong checksum at the end."""
    plain = b'{"prompt": "hi", "max_tokens": 1}' * 20
    packed = gzip.compress(plain)
    return [
        ("gzip", plain),
        ("deflate", plain),
        ("gzip", packed[:-8] + b"\x00" * 8),
        ("deflate", zlib.compress(plain)[:-4] + b"\x00" * 4),
    ]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", CHAT),
        ("POST", TEXT),
        ("PUT", "/v1/speculation/x"),
        ("POST", "/v1/experiments"),
        ("PUT", "/v1/experiments/x"),
        ("POST", "/v1/experiments/x/promote"),
    ],
)
async def test_a_body_that_does_not_decompress_is_refused(service: Service, method: str, path: str) -> None:
    """Every route that reads a body answers 400 in the error shape, and the service goes on."""
    for encoding, data in encoded_bodies():
        headers = {"Content-Encoding": encoding}
        async with service.client.request(method, service.url + path, data=data, headers=headers) as response:
            error = json.loads(await response.read())["error"]
            assert (response.status, error["type"]) == (400, "invalid_request_error"), (encoding, data[:20])
            assert len(error["message"]) < 400
            assert response.headers["Connection"] == "close"
    assert (await service.post(TEXT, {"prompt": "hi"}))[0] == 200


async def test_a_compressed_body_is_bounded_by_what_it_holds(service: Service) -> None:
    """A right one is served; one that grows beyond the limit is 413, however few bytes were sent."""
    right = gzip.compress(b'{"prompt": "hi", "max_tokens": 1}')
    assert (await service.post(TEXT, right, headers={"Content-Encoding": "gzip"}))[0] == 200
    for encoding, pack in (("gzip", gzip.compress), ("deflate", zlib.compress)):
        status, body = await service.post(TEXT, pack(b" " * 50_000_000), headers={"Content-Encoding": encoding})
        assert (status, body["error"]["code"]) == (413, "request_too_large")


CHAT_BODY = {"messages": MESSAGES}
LONG_CHATS: list[dict[str, Any]] = [
    *(
        {name: LONG}
        for name in ("model", "temperature", "n", "stop", "speculation", "stream", "cache_salt", "prediction")
    ),
    *(
        {name: LONG}
        for name in ("logit_bias", "stream_options", "response_format", "modalities", "chat_template_kwargs")
    ),
    *({name: 5} for name in (LONG, f"`{LONG}", f"a.{LONG}", f"[{LONG}", "\u2028" * 300_000, "\x00" * 300_000)),
    {"messages": [{"role": LONG, "content": "hi"}]},
    {"messages": [{"role": "user", "content": [{"type": LONG, "text": "hi"}]}]},
    {"messages": [{"role": "user", "content": [LONG]}]},
    {"messages": [{"role": "user", "content": "hi", LONG: 1}]},
    {"messages": [LONG]},
    {"stop": [LONG]},
    {"stop": [LONG] * 2},
    {"logit_bias": {LONG: 1}},
    {"logit_bias": {"5": LONG}},
    {"stop_token_ids": [LONG]},
    {"speculation": {"method": LONG}},
    {"speculation": {"method": "ngram", LONG: 1}},
    {"speculation": {"method": "ngram", "num_speculative_tokens": LONG}},
    {"speculation": {"method": "first", "proposers": [{"method": LONG}]}},
    {"prediction": {"type": LONG, "content": "hi"}},
    {"response_format": {"type": LONG}},
    {"modalities": [LONG]},
    {"metadata": [LONG]},
    {"seed": LONG},
    {"tools": LONG},
    {"user": [LONG]},
]
LONG_TEXTS: list[dict[str, Any]] = [
    {"prompt": [5, LONG]},
    {"prompt": [[5, LONG]]},
    {"prompt": [[5, [LONG]]]},
    {"prompt": {"a": LONG}},
    {"prompt": "hi", "model": "\u20ac" * 300_000},
    {"prompt": "hi", "model": "\x07" * 300_000},
    {"prompt": "hi", "speculation": "\U0001f600" * 200_000},
]
ARMS = [{"name": name, "speculation": {"method": "none"}} for name in "ab"]
LONG_DEFINITIONS: list[dict[str, Any]] = [
    {"name": LONG},
    *({"name": "x", name: LONG} for name in ("hypothesis", "unit", "metric", "allocation", "at_end", "arms", LONG)),
    {"name": "x", "filter": {"model": LONG}},
    {"name": "x", "filter": {"route": f"\n{LONG}"}},
    {"name": "x", "filter": {"header": {"name": LONG, "value": "a"}}},
    {"name": "x", "arms": [{**ARMS[0], "name": LONG}, ARMS[1]]},
    {"name": "x", "arms": [{"name": "a", "profile": LONG}, ARMS[1]]},
    {"name": "x", "arms": [{"name": "a", "speculation": {"method": LONG}}, ARMS[1]]},
    {"name": "x", "guardrails": [{"metric": LONG, "limit": 1}]},
]


@pytest.fixture
async def roomy(start_service: StartService) -> Service:
    """A service that reads bodies of 4 MiB and refuses unknown fields."""
    limits = LimitSettings(max_body_bytes=4 * 1024**2)
    return await start_service(server=ServerSettings(unknown_fields="refuse"), limits=limits)


async def test_no_answer_and_no_log_line_repeats_a_long_value(roomy: Service) -> None:
    """With a megabyte in any field, field name or address, an answer is below 2 kB and a log line below 4 kB."""
    posts: list[tuple[str, str, object]] = [
        *(("POST", CHAT, {**CHAT_BODY, **fields}) for fields in LONG_CHATS),
        *(("POST", TEXT, fields) for fields in LONG_TEXTS),
        *(("POST", "/v1/experiments", {"arms": ARMS, **fields}) for fields in LONG_DEFINITIONS),
        ("PUT", "/v1/speculation/x", {"speculation": {"method": LONG}}),
        ("PUT", "/v1/speculation/x", {"speculation": {"method": "none"}, LONG: 1}),
        ("PUT", "/v1/experiments/x", {"name": LONG, "arms": ARMS}),
        ("POST", "/v1/experiments/x/promote", {"arm": LONG}),
        ("POST", "/v1/experiments/x/promote", {LONG: 1}),
    ]
    name = "y" * 7000
    posts += [
        ("PUT", f"/v1/speculation/{name}", {"speculation": {"method": "none"}}),
        ("POST", f"/v1/engines/{name}/drain", {}),
        ("POST", f"/v1/experiments?draft={name}", {"name": "x", "arms": ARMS}),
        ("POST", f"/v1/{name}", {}),
        *(("POST", f"/v1/experiments/{name}/{verb}", {}) for verb in ("start", "stop", "promote")),
        *(("GET", f"/v1/{place}/{name}", {}) for place in ("models", "speculation", "experiments", "audit", "page")),
        *(("DELETE", f"/v1/{place}/{name}", {}) for place in ("models", "speculation", "experiments")),
    ]
    with capture_logs() as logs:
        for method, path, body in posts:
            data = io.BytesIO(json.dumps(body, ensure_ascii=False).encode())
            async with roomy.client.request(method, roomy.url + path, data=data) as response:
                answer = await response.read()
                place = (method, path[:40], str(body)[:80])
                assert 400 <= response.status < 500, (place, response.status, answer[:300])
                assert len(answer) < 2000, (place, answer[:3000])
                assert json.loads(answer)["error"]["message"]
    assert [entry for entry in logs if len(msgspec.json.encode(entry)) >= 4000] == []
    assert len(logs) >= len(posts) - 20


async def test_no_message_of_a_socket_repeats_a_long_value(roomy: Service) -> None:
    """On the WebSocket, too, an error is below 2 kB and a log line below 4 kB, whatever was sent."""
    requests = [{**CHAT_BODY, **fields} for fields in LONG_CHATS if fields != {"cache_salt": LONG}]
    messages: list[Any] = [{"type": "generate", "id": str(i), "request": body} for i, body in enumerate(requests)]
    messages += [{"type": LONG}, {"type": "generate", "id": LONG, "request": {}}, {"type": "cancel", "id": LONG}, LONG]
    messages += [{"type": "generate", "id": "a", LONG: 1, "request": CHAT_BODY}, {"type": "generate", "id": "a"}]
    with capture_logs() as logs:
        async with roomy.client.ws_connect(f"{roomy.url}/v1/stream") as socket:
            for message in messages:
                await socket.send_json(message)
                answer = await socket.receive_str(timeout=30)
                assert json.loads(answer)["type"] == "error", answer[:300]
                assert len(answer.encode()) < 2000
    assert [entry for entry in logs if len(msgspec.json.encode(entry)) >= 4000] == []


@pytest.mark.parametrize("text", ["x", "\x00", "\u2028", "\u20ac", "\U0001f600", "\ud800", '"', "\\"])
def test_an_error_is_short_whatever_it_is_made_of(text: str) -> None:
    """As a last net, message and field name are cut by what they take as JSON, half characters included."""
    error = ApiError.invalid(text * 100_000, text * 1_000_000)
    assert len(error.encode()) < 2000
    assert error.body.message.endswith("…")
    assert len(str(error).encode()) <= MAX_MESSAGE_BYTES
    assert ApiError.invalid(None, "what is right").body.message == "what is right"


def test_shortened_values_are_on_one_line() -> None:
    """A shortened value is printable, 80 characters at most, and says where it was cut."""
    for value in ("a\nb\x00\u2028\u202e" * 100, 10**100, ["x" * 100] * 100, {"a": LONG}, None, True, 1.5, b"\xff" * 99):
        assert shorten(value).isprintable()
        assert len(shorten(value)) <= 80
    assert shorten("short") == "'short'"
    assert shorten(LONG).endswith("…")


def test_a_hint_lists_a_bounded_number_of_names() -> None:
    """Where many or long names are known, some are listed, and how many more there are."""
    hint = did_you_mean("zzz", [f"{i:03d}-{'a' * 60}" for i in range(500)])
    assert len(hint) < 700
    assert hint.endswith("more")
    assert did_you_mean("zzz", ["b", "a"]) == "known are a, b"
    assert did_you_mean(LONG, [LONG[:64]]).startswith("did you mean") or len(did_you_mean(LONG, [LONG])) < 700


def test_every_number_of_the_schema_has_both_bounds() -> None:
    """No integer or float of a request or a definition is unbounded, so a new field cannot forget its bounds."""
    unbounded = {
        path
        for kind in (ChatCompletionRequest, CompletionRequest, Definition)
        for path in _unbounded(msgspec.inspect.type_info(kind), kind.__name__)
    }
    allowed = {f"{kind}.{field}" for kind in ("ChatCompletionRequest", "CompletionRequest") for field in ("seed",)}
    assert unbounded == allowed | {"ChatCompletionRequest.chat_template_kwargs"}


def _unbounded(kind: msgspec.inspect.Type, path: str) -> list[str]:
    """Paths to numbers without a lower or an upper bound; of `seed`, and of floats for a template, code checks them."""
    inspect = msgspec.inspect
    match kind:
        case inspect.Metadata():
            return _unbounded(kind.type, path)
        case inspect.IntType() | inspect.FloatType():
            is_low, is_high = (kind.ge, kind.gt) != (None, None), (kind.le, kind.lt) != (None, None)
            return [] if is_low and is_high else [path]
        case inspect.UnionType():
            return [found for each in kind.types for found in _unbounded(each, path)]
        case inspect.ListType() | inspect.VarTupleType():
            return _unbounded(kind.item_type, path)
        case inspect.DictType():
            return _unbounded(kind.value_type, path)
        case inspect.StructType():
            return [found for each in kind.fields for found in _unbounded(each.type, f"{path}.{each.encode_name}")]
    return []
