"""Requests with extreme values for every route of the service: bodies, paths, queries, headers, WebSocket messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import quote

from benchmarks.extremes import COMMON, JSON_ONLY, TEXTS, encode_json, mutations

SPECULATION: tuple[dict[str, Any], ...] = (
    {"method": "none"},
    {"method": "auto"},
    {"method": "ngram", "num_speculative_tokens": 3, "min_n": 1, "max_n": 3},
    {
        "method": "suffix",
        "num_speculative_tokens": 3,
        "tree_size": 8,
        "length_factor": 2.0,
        "min_confidence": 0.1,
    },
    {"method": "prediction", "num_speculative_tokens": 3},
    {"method": "draft_model", "num_speculative_tokens": 2, "tree_size": 4},
    {"method": "medusa", "num_speculative_tokens": 2, "tree_size": 4},
    {"method": "eagle3", "num_speculative_tokens": 2, "tree_size": 4},
    {"method": "first", "proposers": [{"method": "ngram", "num_speculative_tokens": 2, "min_n": 1, "max_n": 2}]},
)
"""A config of each method, with all its fields."""

COMMON_FIELDS: dict[str, Any] = {
    "model": "default",
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.01,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.0},
    "seed": 7,
    "stop": ["\n\n"],
    "stop_token_ids": [2],
    "min_tokens": 1,
    "ignore_eos": False,
    "n": 1,
    "stream": False,
    "stream_options": None,
    "return_token_ids": True,
    "speculation": SPECULATION[2],
    "cache_salt": "salt",
    "priority": 0,
    "user": "someone",
    "metadata": {"key": "value"},
    "store": False,
    "service_tier": "auto",
    "safety_identifier": "id",
    "prompt_cache_key": "key",
    "prompt_cache_retention": "24h",
    "max_tokens": 2,
    "prediction": {"type": "content", "content": [{"type": "text", "text": "and so on"}]},
    "include_stop_str_in_output": True,
    "truncate": True,
    "truncate_prompt_tokens": 100,
    "skip_special_tokens": False,
    "prompt_logprobs": 1,
    "request_id": "fuzzed",
}
CHAT: dict[str, Any] = {
    **COMMON_FIELDS,
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}], "name": "operator"},
        {
            "role": "assistant",
            "content": "Yes.",
            "name": None,
            "refusal": None,
            "audio": None,
            "function_call": None,
            "reasoning_content": "It is easy.",
            "tool_calls": [],
            "annotations": [],
        },
        {"role": "tool", "content": "3", "tool_call_id": "call00001"},
        {"role": "user", "content": "Count to three."},
    ],
    "add_generation_prompt": True,
    "continue_final_message": False,
    "max_completion_tokens": None,
    "logprobs": True,
    "top_logprobs": 2,
    "chat_template_kwargs": {"enable_thinking": False},
    "response_format": {"type": "text"},
    "parallel_tool_calls": True,
    "modalities": ["text"],
    "verbosity": "low",
    "reasoning_effort": "low",
}
TOOL_CALL = {
    "id": "call00001",
    "type": "function",
    "index": 0,
    "function": {"name": "count", "arguments": '{"to": 3}'},
}
TOOL_CHAT: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "Count to three."},
        {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]},
    ]
}
"""Refused by templates that do not render tool calls, which the embedded model's is one of."""
STREAMED_CHAT: dict[str, Any] = {
    **CHAT,
    "stream": True,
    "prompt_logprobs": None,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False},
}
TEXT: dict[str, Any] = {
    **COMMON_FIELDS,
    "prompt": ["One, two,", [5, 6, 7]],
    "logprobs": 2,
    "echo": True,
    "best_of": 1,
    "parse_special": False,
}
EXPERIMENT: dict[str, Any] = {
    "name": "fuzzed",
    "hypothesis": "faster",
    "arms": [
        {"name": "a", "profile": None, "speculation": {"method": "none"}, "weight": 0.5},
        {"name": "b", "speculation": SPECULATION[2], "weight": 0.5},
    ],
    "unit": "header:X-User",
    "filter": {
        "model": "m",
        "route": "/v1/completions",
        "min_prompt_tokens": 1,
        "max_prompt_tokens": 100,
        "header": {"name": "X-Fuzz", "value": "1"},
    },
    "metric": "tpot",
    "guardrails": [{"metric": "ttft", "limit": 5.0, "max_worsening": 0.5}],
    "min_samples": 40,
    "max_samples": 1000,
    "significance": 0.05,
    "expected_effect": 0.1,
    "adjust": True,
    "allocation": {"kind": "switchback", "slot_seconds": 60.0, "washout_seconds": 5.0},
    "at_end": {"action": "promote", "cool_down_seconds": 60.0, "holdback": 0.1},
}
PROFILE: dict[str, Any] = {"speculation": SPECULATION[3], "default": False}
PROMOTION: dict[str, Any] = {"arm": "a"}
TOKENIZE: dict[str, Any] = {
    "model": "default",
    "prompt": "One <|im_end|> two",
    "messages": None,
    "add_special_tokens": True,
    "parse_special": True,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "chat_template_kwargs": None,
    "return_token_strs": True,
}

BODIES: dict[tuple[str, str], tuple[Any, ...]] = {
    ("POST", "/v1/chat/completions"): (CHAT, STREAMED_CHAT, TOOL_CHAT),
    ("POST", "/v1/completions"): (TEXT, {**TEXT, "prompt": "One, two,"}),
    ("PUT", "/v1/speculation/{name}"): (PROFILE, *({"speculation": each, "default": False} for each in SPECULATION)),
    ("POST", "/v1/experiments"): (
        EXPERIMENT,
        {**EXPERIMENT, "allocation": {"kind": "adaptive", "floor": 0.1}, "at_end": {"action": "report"}},
    ),
    ("PUT", "/v1/experiments/{name}"): (EXPERIMENT,),
    ("POST", "/v1/experiments/{name}/start"): ({},),
    ("POST", "/v1/experiments/{name}/stop"): ({},),
    ("POST", "/v1/experiments/{name}/promote"): (PROMOTION,),
    ("POST", "/v1/engines/{id}/drain"): ({},),
    ("POST", "/tokenize"): (TOKENIZE, {"messages": CHAT["messages"]}),
    ("POST", "/detokenize"): ({"model": "default", "tokens": [5, 6, 7]},),
    ("POST", "/ping"): ({},),
    ("POST", "/page/markdown"): ({"text": "**a** `b`\n\n```python\nx = 1\n```\n\n| a |\n| - |\n| b |\n"},),
}
"""Valid bodies of the routes that read one; those of a WebSocket's messages are the same as the first two routes'."""

HEADERS = (
    "X-Request-Id", "Content-Length", "Content-Type", "Content-Encoding", "Transfer-Encoding", "Authorization", "Host",
    "Origin", "Sec-WebSocket-Key", "Sec-WebSocket-Version", "Sec-WebSocket-Protocol", "Sec-WebSocket-Extensions",
    "Upgrade", "Connection", "Accept", "Accept-Encoding", "Accept-Language", "Range", "If-None-Match",
    "If-Modified-Since", "Expect", "Cookie", "X-Forwarded-For", "X-Forwarded-Proto", "X-Forwarded-Host", "Forwarded",
    "Idempotency-Key", "Last-Event-ID", "X-Tenant", "X-User", "Traceparent",
)  # fmt: skip
HEADER_VALUES = (
    "", " ", "0", "-1", "9" * 30, "9" * 5_000, "a" * 7_000, "gzip", "deflate", "br", "zstd", "identity", "chunked",
    "xchunked", "chunked, chunked", "websocket", "Upgrade", "close", "100-continue", "evil.example", "localhost:0",
    "[::1", "null", "x://y://host", "application/json; charset=utf-7", "multipart/form-data", "Bearer ", "Bearer \x7f",
    "bytes=0-99999999999999999999", "\x80\xff", "a,b", "%00", "forerun.key.====",
)  # fmt: skip
NAMES = (*TEXTS[:8], "a" * 3_000, "..", ".", "%2e%2e", "a/b", "a%2fb", "fuzzed", "auto", "\\", "?", "#", "nul\0l")


class Request(NamedTuple):
    """One request, as bytes go out."""

    method: str
    route: str
    """As the router has it; the path may differ."""
    path: str
    body: bytes
    headers: tuple[tuple[str, str], ...]
    description: str


def body_requests() -> Iterator[Request]:
    """Every field of every route's body with every extreme value, and bodies that are nearly JSON."""
    for (method, route), templates in BODIES.items():
        path = route.replace("{name}", "fuzzed").replace("{id}", "nobody")
        for template in templates:
            for mutation in mutations(template, (*COMMON, *JSON_ONLY)):
                yield Request(method, route, path, encode_json(mutation.body), (), mutation.description)
            whole = encode_json(template)
            for cut in range(0, len(whole), max(len(whole) // 20, 1)):
                yield Request(method, route, path, whole[:cut], (), f"the first {cut} bytes of a body")
                flipped = whole[:cut] + bytes([whole[cut] ^ 0x80]) + whole[cut + 1 :]
                yield Request(method, route, path, flipped, (), f"byte {cut} flipped")


def path_requests(routes: list[tuple[str, str]]) -> Iterator[Request]:
    """Every route with extreme names and queries, and with methods that it does not have."""
    for method, route in routes:
        names = [quote(name, safe="%./?#\\") for name in NAMES if name] if "{" in route else ["-"]
        for name in names:
            path = route.replace("{name}", name).replace("{name:.+}", name).replace("{id}", name)
            yield Request(method, route, path, b"{}", (), f"name {name[:60]!r}")
        plain = route.replace("{name}", "fuzzed").replace("{name:.+}", "fuzzed").replace("{id}", "nobody")
        for query in ("draft=1", "draft=true&draft=false", "draft=" + "9" * 5_000, "=&&=", "%ff=%00", "a" * 6_000):
            yield Request(method, route, f"{plain}?{query}", b"{}", (), f"query {query[:60]!r}")
        for other in ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"):
            if other != method and (other, route) not in routes:
                yield Request(other, route, plain, b"", (), f"method {other}")


def header_requests() -> Iterator[Request]:
    """A few routes with every header that a server or a proxy may read, and extreme values."""
    body = encode_json({"prompt": "One", "max_tokens": 1})
    for header in HEADERS:
        for value in HEADER_VALUES:
            described = f"{header}: {value[:60]!r}"
            yield Request("POST", "/v1/completions", "/v1/completions", body, ((header, value),), described)
            yield Request("GET", "/v1/stream", "/v1/stream", b"", ((header, value),), described)
            yield Request("GET", "/v1/models", "/v1/models", b"", ((header, value), (header, value)), described)


def socket_messages() -> Iterator[tuple[bytes, str]]:
    """Messages for a WebSocket, each with what is extreme about it."""
    for request in (CHAT, TEXT):
        template = {"type": "generate", "id": "fuzzed", "request": {**request, "stream": False}}
        for mutation in mutations(template, (*COMMON, *JSON_ONLY)):
            yield encode_json(mutation.body), mutation.description
    for mutation in mutations({"type": "cancel", "id": "fuzzed"}, (*COMMON, *JSON_ONLY)):
        yield encode_json(mutation.body), mutation.description
    for data in (b"", b"\0", b"\xff\xfe", b"{", b"[" * 5_000, b"null", b"\xed\xa0\x80"):
        yield data, f"bytes {data[:20]!r}"
