from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import pytest

from benchmarks.conversation import Prompter
from benchmarks.decode import Run, parse, peer_settings
from benchmarks.idle import descendants, memory_mb
from benchmarks.peers import PEERS, check_peers
from benchmarks.questions import Question
from benchmarks.server_process import ServerFailedError, cpu_seconds, serving
from benchmarks.system import Answer, Arrival, Ask
from benchmarks.workers.protocol import Clock
from speculation.settings import EngineSettings

QUESTIONS = [
    Question(question_id=i, category=category, turns=[f"first of {i}", f"second of {i}"])
    for i, category in enumerate(["chat", "chat", "edit"])
]


class LettersPrompter(Prompter):
    """Renders without a model: one token a letter."""

    def __init__(self) -> None:
        """It needs no folder."""

    def ask(self, users: Sequence[str], answers: Sequence[Sequence[int]], *, num_tokens: int, seed: int) -> Ask:
        text = "|".join(users) + str(answers)
        return Ask(messages=[], token_ids=list(text.encode()), num_tokens=num_tokens, seed=seed)


class FixedSystem:
    """Counts up from its first token, and keeps a log of who was asked for how many tokens."""

    precision = "exact"

    def __init__(self, name: str, method: str, first_token: int, log: list[tuple[str, list[int]]]) -> None:
        self.name = name
        self.method = method
        self._first_token = first_token
        self._log = log

    async def answer(self, asks: Sequence[Ask]) -> list[Answer]:
        self._log.append((self.method, [ask.num_tokens for ask in asks]))
        return [self._answer(ask.num_tokens) for ask in asks]

    async def natural_answer(self, ask: Ask) -> Answer:
        """Ends after as many tokens as the question's number, and two."""
        return self._answer(min(ask.num_tokens, ask.seed + 2))

    def _answer(self, num_tokens: int) -> Answer:
        ids = list(range(self._first_token, self._first_token + num_tokens))
        return Answer(token_ids=ids, arrivals=[Arrival(0.1, 1), Arrival(0.2, num_tokens - 1)])


async def measured(batch: int, turns: int = 1, wrong: int = 0) -> tuple[Run, list[tuple[str, list[int]]]]:
    log: list[tuple[str, list[int]]] = []
    plain = FixedSystem("forerun", "none", 0, log)
    run = Run(LettersPrompter(), plain, [plain, FixedSystem("forerun", "ngram", wrong, log)])
    await run.measure(QUESTIONS, max_tokens=3, turns=turns, batch=batch)
    return run, log


async def test_everybody_generates_as_many_tokens_as_plain_decoding() -> None:
    """The natural length of the answer, up to the limit, is asked of every system."""
    _, log = await measured(batch=1)
    assert [lengths for _, lengths in log] == [[2], [2], [3], [3], [3], [3]]


async def test_the_order_rotates_and_the_table_does_not() -> None:
    """Each question is begun by another system, and results are in the order of the systems."""
    run, log = await measured(batch=1)
    assert [method for method, _ in log] == ["none", "ngram", "ngram", "none", "none", "ngram"]
    assert [found.method for found in run.measurements] == ["none", "ngram"] * 3


async def test_several_at_a_time_are_sent_together() -> None:
    """A batch holds as many requests as are left, at most as many as asked for."""
    run, log = await measured(batch=2)
    assert [len(lengths) for _, lengths in log] == [2, 2, 1, 1]
    assert all(found.category is None for found in run.measurements)


async def test_later_turns_are_asked_when_they_are_wanted() -> None:
    """With two turns every question is asked twice, the second time behind the answer to the first."""
    run, _ = await measured(batch=1, turns=2)
    assert len(run.measurements) == 2 * 2 * len(QUESTIONS)


async def test_other_token_ids_than_those_of_plain_decoding_are_noticed() -> None:
    """A method that answers differently is marked, on every question where it does."""
    run, _ = await measured(batch=1, wrong=7)
    assert [found.is_exact for found in run.measurements] == [True, False] * 3


async def test_a_server_that_ends_says_why() -> None:
    """The error holds the exit status and what was printed last."""
    command = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    with pytest.raises(ServerFailedError, match=r"status 3: no such model"):
        async with serving(lambda port: command, "/"):
            pass


async def test_a_server_is_ready_inside_and_gone_outside() -> None:
    """It answers where it says, its processor time is known, and nothing listens there afterwards."""
    code = (
        "import http.server, sys; "
        "http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()"
    )
    async with aiohttp.ClientSession() as session:
        async with serving(lambda port: [sys.executable, "-c", code, str(port)], "/") as server:
            async with session.get(server.url) as response:
                assert response.status == 200
            seconds = cpu_seconds(server.pid)
            assert seconds is None or seconds > 0.0
        with pytest.raises(aiohttp.ClientConnectionError):
            await session.get(server.url)


def test_a_worker_keeps_no_more_tokens_than_were_asked_for() -> None:
    """What a system generates beyond the wanted length leaves no trace."""
    clock = Clock([{"token_ids": [1], "num_tokens": 3, "seed": 0}])
    for token_ids in ([5], [6, 7, 8], [9]):
        clock.note(0, token_ids)
    (found,) = clock.answers()
    assert found["token_ids"] == [5, 6, 7]
    assert [num_tokens for _, num_tokens in found["arrivals"]] == [1, 2]


def test_unknown_and_unfit_peers_are_refused() -> None:
    """A name must be one of those known, and a peer that answers one at a time takes no batch."""
    check_peers(list(PEERS), 1)
    with pytest.raises(ValueError, match=r"'vllm' is not known; known are .*llama.cpp"):
        check_peers(["vllm"], 1)
    with pytest.raises(ValueError, match="transformers-assisted answers one request at a time"):
        check_peers(["transformers-assisted"], 16)


def test_peers_get_the_model_that_is_served(tmp_path: Path) -> None:
    """The target's folder goes to who reads folders, and the GGUF file it came from to who reads those."""
    settings = peer_settings(parse(["--batch", "4"]), EngineSettings(model=str(tmp_path)))
    assert (settings.model_folder, settings.gguf, settings.batch) == (tmp_path, tmp_path / "model.gguf", 4)


async def test_a_service_s_processes_are_found_with_their_memory() -> None:
    """The children of a process and theirs are listed, and each has memory."""
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(flush=True); input()'])"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        await process.stdout.readline()
        found = list(descendants(process.pid))
        assert len(found) == 1
        assert all(memory_mb(pid) > 0.5 for pid in (process.pid, *found))
    finally:
        await process.communicate(b"\n")
