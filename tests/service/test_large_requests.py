"""Large requests are parsed by a process of their own: like small ones, in order of size, and delaying nobody."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from service import large_request_worker
from service.body_budget import SMALL_BODY_BYTES, BodyBudget
from service.errors import ApiError
from service.large_request_messages import Parse, Refused
from service.large_requests import COMMAND, parsed
from service.served_model import BODY_ROOM_BYTES, ServedModel
from service.settings import LimitSettings
from service.text_bound import bytes_per_token
from service.tokenizer import PIECE_CHARACTERS, Tokenizer, TooManyTokensError
from speculation.messages import Ready
from tests.service.conftest import MAKERS, Service, StartService

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


@pytest.fixture
def model(model_folder: Path) -> ServedModel:
    """The model that the services of these tests serve, with a context of 2,048 tokens."""
    ready = Ready(
        model_fingerprint="x",
        model_folder=str(model_folder),
        max_model_len=2048,
        vocab_size=1000,
        num_blocks=1000,
        block_size=16,
        methods=["none"],
        max_waiting=8,
        description="",
    )
    return ServedModel.load("tiny", model_folder, ready)


async def test_what_cannot_fit_is_refused(start_service: StartService) -> None:
    """Counts, choices and texts over every bound are refused by name, briefly."""
    service = await start_service(limits=LimitSettings(max_body_bytes=4 * 1024**2), max_model_len=2048)
    for path, body, param, code in TOO_MUCH:
        status, answer = await service.post(path, body)
        error = answer["error"]
        assert (status, error["param"], error["code"]) == (400, param, code), error
        assert len(error["message"]) < 300


@pytest.mark.parametrize("number", range(len(TOO_MUCH)))
def test_what_cannot_fit_is_not_tokenized(model: ServedModel, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused by count or length never reaches the tokenizer."""

    def fail(*_: object, **__: object) -> list[int]:
        raise AssertionError("the tokenizer was asked")

    monkeypatch.setattr(Tokenizer, "encode", fail)
    monkeypatch.setattr(Tokenizer, "encode_rendered", fail)
    path, fields, param, _ = TOO_MUCH[number]
    body = json.dumps(fields).encode()
    message = Parse(kind="chat" if path == CHAT else "completion", num_bytes=len(body), profiles={})
    refused = large_request_worker.answer(message, body, model, LimitSettings())
    assert isinstance(refused, Refused), refused
    assert refused.error.param == param


def test_a_mistake_of_ours_is_told_apart(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception while a large request is parsed is 500 for the client, and a lack of memory 503."""
    for error, status in ((RuntimeError("ours"), 500), (MemoryError(), 503)):

        def fail(*_: object, error: Exception = error, **__: object) -> list[int]:
            raise error

        monkeypatch.setattr(Tokenizer, "encode", fail)
        message = Parse(kind="completion", num_bytes=0, profiles={})
        answer = large_request_worker.answer(message, b'{"prompt":"hi"}', model, LimitSettings())
        with pytest.raises(ApiError) as caught:
            parsed(answer)
        assert caught.value.status == status


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
    assert service.front.large_requests.num_waiting == 0


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


async def streamed_tokens(service: Service, path: str, body: dict[str, object]) -> dict[int, list[int]]:
    """Token ids of a streamed answer by choice."""
    tokens: dict[int, list[int]] = {}
    for event in await service.events(path, body):
        for choice in [] if event == "[DONE]" else event["choices"]:
            tokens.setdefault(choice["index"], []).extend(choice["token_ids"])
    return tokens


async def test_a_large_request_is_answered_like_a_small_one(service: Service) -> None:
    """Padding that makes a request large changes nothing of its answer, chat and completion, whole and streamed."""
    for path, asked in (
        (TEXT, {"prompt": ["hi there", "you"], "n": 2, "echo": True, "logprobs": 1}),
        (CHAT, {"messages": [USER], "logprobs": True, "speculation": "ngram"}),
    ):
        small: dict[str, object] = {**asked, "max_tokens": 5, "seed": 7, "return_token_ids": True}
        large = {**small, "metadata": {"padding": "x" * 2 * SMALL_BODY_BYTES}}
        answers = [await service.post(path, body) for body in (small, large)]
        assert [status for status, _ in answers] == [200, 200], answers
        assert answers[0][1]["choices"] == answers[1][1]["choices"]
        assert await streamed_tokens(service, path, small) == await streamed_tokens(service, path, large)
    assert service.front.bodies.held == 0


def pids() -> list[int]:
    """Processes for large requests that this process has."""
    found = []
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        with suppress(FileNotFoundError):  # it has just ended
            if b"large_request_worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return found


def padded(num_bytes: int, **fields: object) -> dict[str, object]:
    return {"prompt": "hi", "max_tokens": 1, "user": "x" * num_bytes, **fields}


async def test_a_killed_process_fails_its_request_alone(service: Service) -> None:
    """When the process is killed, its request gets 503 with a reason, and the next one a new process."""
    assert (await service.post(TEXT, padded(2 * SMALL_BODY_BYTES)))[0] == 200
    (pid,) = pids()
    os.kill(pid, signal.SIGSTOP)
    request = asyncio.create_task(service.post(TEXT, padded(2 * SMALL_BODY_BYTES)))
    await asyncio.sleep(0.2)
    os.kill(pid, signal.SIGKILL)
    status, answer = await request
    assert (status, answer["error"]["code"]) == (503, "large_request_failed")
    assert (await service.post(TEXT, padded(2 * SMALL_BODY_BYTES)))[0] == 200
    assert pid not in pids()


async def test_a_process_that_hangs_is_killed(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that takes too long gets 503, and the process that it hangs in is gone."""
    assert (await service.post(TEXT, padded(2 * SMALL_BODY_BYTES)))[0] == 200
    (pid,) = pids()
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr("service.large_requests.PARSE_SECONDS", 0.3)
    assert (await service.post(TEXT, padded(2 * SMALL_BODY_BYTES)))[0] == 503
    await service.until(lambda: pids() == [])


async def test_the_process_ends_when_it_is_idle(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without large requests there is no process; the next one starts another."""
    assert pids() == []
    monkeypatch.setattr("service.large_requests.IDLE_SECONDS", 0.2)
    for _ in range(2):
        assert (await service.post(TEXT, padded(2 * SMALL_BODY_BYTES)))[0] == 200
        await service.until(lambda: pids() == [])


async def test_the_smallest_request_goes_first(start_service: StartService) -> None:
    """Waiting requests are parsed in order of size; one whose client has left is skipped; a metric counts them."""
    service = await start_service(limits=LimitSettings(max_body_bytes=1024**2))
    assert (await service.post(TEXT, padded(2 * SMALL_BODY_BYTES)))[0] == 200
    (pid,) = pids()
    os.kill(pid, signal.SIGSTOP)
    order: list[int] = []

    async def ask(size: int) -> None:
        assert (await service.post(TEXT, padded(size * SMALL_BODY_BYTES)))[0] == 200
        order.append(size)

    first = asyncio.create_task(ask(2))
    await asyncio.sleep(0.2)
    waiting = {size: asyncio.create_task(ask(size)) for size in (6, 4, 2, 3)}
    await service.until(lambda: service.front.large_requests.num_waiting == 4)
    assert "forerun_large_requests_waiting 4.0" in (await service.get("/metrics"))[1]
    waiting[2].cancel()
    await asyncio.sleep(0.2)
    os.kill(pid, signal.SIGCONT)
    await asyncio.gather(first, *waiting.values(), return_exceptions=True)
    assert order == [2, 3, 4, 6]
    assert service.front.bodies.held == 0


def test_the_process_ends_with_the_front() -> None:
    """When the front's end of the socket is closed, as when the front is killed, the process exits by itself."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(COMMAND, stdin=theirs.fileno())
    ours.close()
    assert process.wait(30) == 0


async def test_an_operators_body_is_small(service: Service) -> None:
    """A profile or an experiment over 64 KiB is refused with the limit, before it is parsed."""
    async with service.client.put(f"{service.url}/v1/speculation/a", data=b"[" * (SMALL_BODY_BYTES + 1)) as response:
        assert response.status == 413
        assert str(SMALL_BODY_BYTES) in (await response.json())["error"]["message"]


async def test_large_bodies_take_turns() -> None:
    """Each pass of the event loop reads a piece of one large body, however many arrive."""
    budget = BodyBudget(100)
    num_passes = num_pieces = 0

    async def count_passes() -> None:
        nonlocal num_passes
        while True:
            num_passes += 1
            await asyncio.sleep(0)

    async def read() -> None:
        nonlocal num_pieces
        async with budget.hold(1) as hold:
            for _ in range(20):
                await hold.take_turn()
                num_pieces += 1

    counting = asyncio.create_task(count_passes())
    await asyncio.gather(*(read() for _ in range(5)))
    counting.cancel()
    assert num_pieces == 100
    assert num_passes >= num_pieces
