"""What is too much is refused before it is tokenized, and long texts keep nobody else waiting."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from service.errors import ApiError
from service.long_texts import LONG_TEXT_BYTES, LongTexts
from service.served_model import BODY_ROOM_BYTES
from service.settings import LimitSettings
from service.text_bound import bytes_per_token
from service.tokenizer import PIECE_CHARACTERS, Tokenizer, TooManyTokensError
from tests.service.conftest import MAKERS, SPECIALS, Service, StartService

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG = "x1" * 200_000
USER = {"role": "user", "content": "hi"}
PARTS = [{"type": "text", "text": LONG}]
TOO_MUCH: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"messages": [{**USER, "content": LONG}]}, "messages", "context_length_exceeded"),
    (
        CHAT,
        {"messages": [{**USER, "content": [{"type": "text", "text": LONG}]}]},
        "messages",
        "context_length_exceeded",
    ),
    (CHAT, {"messages": [{**USER, "name": LONG}]}, "messages", "context_length_exceeded"),
    (CHAT, {"messages": [USER] * 3000}, "messages", "context_length_exceeded"),
    (
        CHAT,
        {"messages": [USER], "chat_template_kwargs": {"a": LONG}},
        "chat_template_kwargs",
        "context_length_exceeded",
    ),
    (TEXT, {"prompt": LONG}, "prompt", "context_length_exceeded"),
    (TEXT, {"prompt": ["hi", LONG]}, "prompt", "context_length_exceeded"),
    (TEXT, {"prompt": "é" * 100_000}, "prompt", "context_length_exceeded"),
    (TEXT, {"prompt": [1] * 3000}, "prompt", "context_length_exceeded"),
    (TEXT, {"prompt": [[1], [1] * 3000]}, "prompt", "context_length_exceeded"),
    (
        TEXT,
        {"prompt": "hi", "prediction": {"type": "content", "content": LONG}},
        "prediction.content",
        "context_length_exceeded",
    ),
    (TEXT, {"prompt": ["hi"] * 1000}, "prompt", "invalid_value"),
    (TEXT, {"prompt": "hi", "n": 33}, "n", "invalid_value"),
    (CHAT, {"messages": [USER], "n": 33}, "n", "invalid_value"),
]


@pytest.fixture
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.load(model_folder)


async def test_what_cannot_fit_is_refused_unread(start_service: StartService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts, choices and texts over every bound are refused by name, briefly, and nothing of them is tokenized."""
    service = await start_service(limits=LimitSettings(max_body_bytes=4 * 1024**2), max_model_len=2048)

    def fail(*_: object, **__: object) -> list[int]:
        raise AssertionError("the tokenizer was asked")

    monkeypatch.setattr(Tokenizer, "encode", fail)
    monkeypatch.setattr(Tokenizer, "encode_rendered", fail)
    for path, body, param, code in TOO_MUCH:
        status, answer = await service.post(path, body)
        error = answer["error"]
        assert (status, error["param"], error["code"]) == (400, param, code), error
        assert len(error["message"]) < 300


async def test_a_body_is_as_large_as_the_context_allows(start_service: StartService) -> None:
    """Without a setting the largest body follows from context and longest token; what is over it gets 413."""
    service = await start_service(max_model_len=2048)
    longest = service.front.model.tokenizer.bytes_per_token
    assert longest is not None
    most = service.front.max_body_bytes
    assert most == service.front.model.context_length * longest + BODY_ROOM_BYTES
    assert (await service.post(TEXT, json.dumps({"prompt": "hi"}).encode().ljust(most)))[0] == 200
    assert (await service.post(TEXT, b" " * (most + 1)))[0] == 413


async def test_long_texts_keep_nobody_waiting(service: Service) -> None:
    """While a dozen long texts are refused, small requests and /health/live are answered."""
    most = service.front.model.max_text_bytes
    assert most is not None
    body = {"prompt": "é" * (most // 2)}
    storm = [asyncio.create_task(service.post(TEXT, body)) for _ in range(12)]
    for _ in range(20):
        assert (await service.get("/health/live"))[0] == 200
        assert (await service.post(TEXT, {"prompt": "hi"}))[0] == 200
    answers = await asyncio.gather(*storm)
    assert {answer["error"]["code"] for _, answer in answers} == {"context_length_exceeded"}
    assert service.front.long_texts.pending == 0


def test_encoding_lets_other_threads_run(tokenizer: Tokenizer) -> None:
    """A thread that encodes a long text does not hold the interpreter: another one goes on meanwhile."""
    working = threading.Thread(target=tokenizer.encode, args=(" x1é" * 300_000,))
    working.start()
    longest, before = 0.0, time.perf_counter()
    while working.is_alive():
        time.sleep(0.001)
        now = time.perf_counter()
        longest, before = max(longest, now - before), now
    began = time.perf_counter()
    tokenizer.encode(" x1é" * 300_000)
    assert longest < 0.5 * (time.perf_counter() - began)


@pytest.mark.parametrize("maker", MAKERS)
def test_no_text_has_more_bytes_than_its_tokens_allow(maker: str) -> None:
    """Texts of the longest tokens stay within the bound by which texts are refused."""
    tokenizer = Tokenizer(MAKERS[maker]().to_str().encode())
    bound = tokenizer.bytes_per_token
    assert bound is not None
    for token_id in range(tokenizer.vocab_size):
        text = tokenizer.spelling(token_id).decode(errors="ignore") * 50
        assert len(text.encode()) <= bound * max(len(tokenizer.encode(text, parse_special=True)), 1)


def test_a_tokenizer_that_drops_text_sets_no_bound() -> None:
    """Where spaces vanish, or a run of unknown characters is one token, no text is refused by its length."""
    model = {"type": "BPE", "vocab": {}, "byte_fallback": True}
    assert bytes_per_token({"model": model}, 10) == 10
    assert bytes_per_token({"model": model, "normalizer": {"type": "NFC"}}, 10) == 40
    assert bytes_per_token({"model": {**model, "byte_fallback": False}}, 10) is None
    assert bytes_per_token({"model": {**model, "type": "WordPiece"}}, 10) is None
    assert bytes_per_token({"model": model, "normalizer": {"type": "Strip"}}, 10) is None
    assert bytes_per_token({"model": model, "pre_tokenizer": {"type": "Whitespace"}}, 10) is None
    assert bytes_per_token({"model": model, "added_tokens": [{"rstrip": True}]}, 10) is None


def test_a_long_text_is_counted_in_pieces_and_no_further(tokenizer: Tokenizer) -> None:
    """A text of far too many tokens is refused without being encoded whole; one that fits is encoded exactly."""
    with pytest.raises(TooManyTokensError, match="more than 200"):
        tokenizer.encode("x1" * PIECE_CHARACTERS, most=100)
    with pytest.raises(TooManyTokensError, match=r"^101$"):
        tokenizer.encode("1" * 101, most=100)
    text = "The quick brown fox " * 5000
    assert tokenizer.encode(text, most=100_000) == tokenizer.encode(text)


def test_control_tokens_are_found_wherever_a_piece_ends(tokenizer: Tokenizer) -> None:
    """A long text is protected as a short one is, wherever its control tokens lie."""
    for shift in range(12):
        text = ("a" * shift + SPECIALS[1] + "b" * (PIECE_CHARACTERS - len(SPECIALS[1]))) * 3
        protected = tokenizer.protect(text)
        assert not any(special in protected for special in SPECIALS)
        assert tokenizer.decode(tokenizer.encode_rendered(protected)) == text


async def test_the_shortest_text_goes_first() -> None:
    """The shortest text that waits is next; one that was given up is passed over; too many are refused."""
    texts = LongTexts(max_bytes=20 * LONG_TEXT_BYTES)
    order: list[int] = []
    gate = threading.Event()
    first = asyncio.create_task(texts.run(1, gate.wait))
    await asyncio.sleep(0)
    sizes = (5 * LONG_TEXT_BYTES, 3 * LONG_TEXT_BYTES, LONG_TEXT_BYTES, 2 * LONG_TEXT_BYTES)
    waiting = {size: asyncio.create_task(texts.run(size, lambda size=size: order.append(size))) for size in sizes}  # type: ignore[misc]
    await asyncio.sleep(0)
    with pytest.raises(ApiError, match="long texts wait"):
        await texts.run(20 * LONG_TEXT_BYTES, gate.wait)
    waiting[LONG_TEXT_BYTES].cancel()
    gate.set()
    await asyncio.gather(first, *waiting.values(), return_exceptions=True)
    assert order == [2 * LONG_TEXT_BYTES, 3 * LONG_TEXT_BYTES, 5 * LONG_TEXT_BYTES]
    assert texts.pending == 0
    texts.close()
