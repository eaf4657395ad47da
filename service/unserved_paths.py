"""Paths of other servers' APIs that are not served here, and what to use in their place."""

from __future__ import annotations

_CHAT = "use POST /v1/chat/completions"
_TEXT_ONLY = "only text is generated, by POST /v1/chat/completions and POST /v1/completions"
_OLLAMA = "Ollama's API is not served; use the OpenAI routes under /v1, such as POST /v1/chat/completions"
_LLAMA_CPP = "this route of llama.cpp's server is not served; use POST /v1/completions or POST /v1/chat/completions"
_NATIVE = "this server's own generation route is not served; use POST /v1/completions or POST /v1/chat/completions"

_HINTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("/v1/v1",), "the base URL has /v1 twice"),
    (("/v1/responses",), f"the Responses API is not served; {_CHAT}"),
    (("/v1/messages",), f"Anthropic's Messages API is not served; {_CHAT}"),
    (("/v1/assistants", "/v1/threads", "/v1/conversations"), f"the Assistants API is not served; {_CHAT}"),
    (("/v1/files", "/v1/batches", "/v1/uploads"), f"batches and files are not served; {_CHAT}"),
    (("/v1/fine_tuning",), "models are not trained here; `forerun train` trains draft heads"),
    (
        ("/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/moderations", "/v1/classify", "/pooling", "/rerank"),
        f"embeddings and scores of texts are not served; {_TEXT_ONLY}",
    ),
    (("/v1/images", "/v1/audio", "/v1/videos", "/v1/realtime"), f"only text is served; {_TEXT_ONLY}"),
    (("/v1/tokenize", "/v1/detokenize"), "the route has no /v1: POST /tokenize, POST /detokenize"),
    (("/chat/completions", "/completions", "/models", "/stream"), "the base URL must end with /v1"),
    (("/api/",), _OLLAMA),
    (
        ("/completion", "/infill", "/props", "/slots", "/embedding", "/apply-template", "/lora-adapters"),
        _LLAMA_CPP,
    ),
    (("/generate", "/get_model_info", "/server_info", "/get_server_info", "/invocations"), _NATIVE),
)  # fmt: skip
"""Beginnings of paths, the first that fits counting, and the sentence that answers them."""


def hint_of(path: str) -> str | None:
    """What to use in place of a path that is not served; None for one that no other server is known to have."""
    for beginnings, hint in _HINTS:
        if any(path == each or path.startswith(each.rstrip("/") + "/") for each in beginnings):
            return hint
    return None
