"""`forerun chat` against the scripted engine: on a pipe, on a terminal, and when things go wrong."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from service.chat_command import AnswerText, Palette, Token, chat_command, inert, parse_speculation
from service.pool.settings import TenantSettings
from tests.service.conftest import Service, StartService

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


class Terminal(io.StringIO):
    """What a person sees."""

    def isatty(self) -> bool:
        return True


class Session:
    """One run of the command, and what it printed."""

    def __init__(self, service: Service, *, is_terminal: bool = False, environment: Mapping[str, str] = {}) -> None:
        self._url = service.url
        self._is_terminal = is_terminal
        self._environment = environment
        self.out: io.StringIO = Terminal() if is_terminal else io.StringIO()
        self.errors: io.StringIO = Terminal() if is_terminal else io.StringIO()

    async def run(self, *arguments: str, lines: tuple[str, ...] = ()) -> int:
        """Its exit status, after the lines were typed, or came over a pipe."""
        rest = iter(lines)
        return await asyncio.to_thread(
            chat_command,
            ["--url", self._url, "--seed", "5", *arguments],
            read=lambda: next(rest, None),
            is_interactive=self._is_terminal,
            out=self.out,
            errors=self.errors,
            environment=self._environment,
        )


async def answer_of(service: Service, *questions: str, **changes: Any) -> str:
    """What REST says to the last of the questions, the earlier ones having been asked before."""
    messages: list[dict[str, str]] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        _, body = await service.post("/v1/chat/completions", {"messages": messages, "seed": 5, **changes})
        messages.append(body["choices"][0]["message"])
    return messages[-1]["content"]


async def test_a_pipe_gets_the_answer_and_nothing_else(service: Service) -> None:
    """The text alone goes to stdout, without a colour; how it went goes to stderr."""
    session = Session(service)
    assert await session.run(lines=("Größe 東京 🎉 fox",)) == 0
    assert session.out.getvalue() == await answer_of(service, "Größe 東京 🎉 fox") + "\n"
    said = session.errors.getvalue()
    assert "mean acceptance length 3.00" in said
    assert "seed 5" in said
    assert re.search(r"ngram \d+, target \d+", said)
    assert "\x1b" not in said


async def test_a_terminal_gets_every_token_in_its_colour(service: Service) -> None:
    """What ngram guessed is coloured, what is the target's own is not; the text is the same."""
    session = Session(service, is_terminal=True, environment={"COLORTERM": "truecolor"})
    assert await session.run("the", "quick", "fox") == 0
    written = session.out.getvalue()
    assert ESCAPE.sub("", written) == await answer_of(service, "the quick fox") + "\n"
    assert "\x1b[38;2;127;176;255m" in written
    assert written.count("m") > written.count("\x1b[0m") > 0


async def test_colours_are_left_out_where_nobody_wants_them(service: Service) -> None:
    """NO_COLOR and a dumb terminal get none."""
    for environment in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        session = Session(service, is_terminal=True, environment=environment)
        assert await session.run("fox") == 0
        assert "\x1b" not in session.out.getvalue() + session.errors.getvalue()


async def test_a_conversation_goes_on_and_can_begin_anew(service: Service) -> None:
    """Later questions are asked with what was said before, until /new; /use changes speculation and nothing else."""
    session = Session(service, is_terminal=True, environment={"NO_COLOR": "1"})
    lines = ("one fox", "two dogs", "/use none", "", "/new", "two dogs", "/use {", "/what", "/use", "/quit", "unseen")
    assert await session.run(lines=lines) == 0
    expected = [
        await answer_of(service, "one fox"),
        await answer_of(service, "one fox", "two dogs"),
        await answer_of(service, "two dogs"),
    ]
    assert session.out.getvalue() == "".join(f"{text}\n" for text in expected)
    said = session.errors.getvalue()
    assert said.count("ngram") == 2
    assert "speculation is '{', which is not valid JSON" in said
    assert "/use NAME" in said
    assert "/what is not a command" in said


async def test_mistakes_are_said_in_the_service_s_words(service: Service) -> None:
    """An unknown profile, JSON that is none, and no service at all end with a message and a status."""
    session = Session(service)
    assert await session.run("--speculation", "ngramm", "hi") == 1
    assert "did you mean 'ngram'?" in session.errors.getvalue()
    assert await session.run("--speculation", "{", "hi") == 2
    assert await session.run("--url", "http://127.0.0.1:9", "hi") == 1
    assert "no answer from http://127.0.0.1:9/v1/stream" in session.errors.getvalue()
    assert session.out.getvalue() == ""
    assert await session.run(lines=("",)) == 0


async def test_a_service_with_keys_is_told_one(start_service: StartService, tmp_path: Path) -> None:
    """A service with keys answers those who have one, by flag, file or variable, and tells others what is missing."""
    (tmp_path / "keys").write_text("somebody s3cret\n")
    (tmp_path / "mine").write_text("s3cret\n")
    service = await start_service(tenants=TenantSettings(api_keys_file=str(tmp_path / "keys")))
    session = Session(service)
    assert await session.run("fox") == 1
    assert (
        "answers 401: API key missing or wrong; give one with --api-key, --api-key-file or FORERUN_API_KEY"
        in session.errors.getvalue()
    )
    assert await session.run("--api-key-file", str(tmp_path / "none"), "fox") == 2
    assert session.out.getvalue() == ""
    assert await session.run("--api-key-file", str(tmp_path / "mine"), "fox") == 0
    assert await session.run("--api-key", "s3cret", "fox") == 0
    assert await Session(service, environment={"FORERUN_API_KEY": "s3cret"}).run("fox") == 0
    assert session.out.getvalue()


async def test_an_interrupt_ends_the_answer_and_not_the_program(service: Service) -> None:
    """SIGINT cancels what is being said: the command reports it and ends as it would have."""
    code = "import sys; from service.__main__ import main; sys.exit(main(['chat', *sys.argv[1:]]))"
    command = [sys.executable, "-c", code, "--url", service.url, "--cache-salt", "slow", "--max-tokens", "150"]
    process = await asyncio.create_subprocess_exec(
        *command,
        "fox " * 40,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    first = await asyncio.wait_for(process.stdout.read(1), 60)
    process.send_signal(signal.SIGINT)
    rest, said = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, "cancelled" in said.decode()) == (0, True), said.decode()
    assert len(first + rest) < 600
    await service.until_idle()


def test_pieces_of_text_go_to_the_tokens_they_belong_to() -> None:
    """Text before a token's offset is of the one before; tokens without text of their own colour nothing."""
    answer = AnswerText()
    assert answer.add("ab", [Token("ngram", 0), Token("target", 1)]) == [("a", "ngram"), ("b", "target")]
    assert answer.add("cde", [Token("suffix", 3), Token("ngram", 4), Token("target", 4)]) == [
        ("c", "target"),
        ("d", "suffix"),
        ("e", "target"),
    ]
    assert answer.text == "abcde"
    assert answer.sources == {"ngram": 2, "target": 2, "suffix": 1}


@pytest.mark.parametrize("text", ["\x1b[2J", "\x9b2J", "a\rb", "\x07", "\u202eabc", "\x7f"])
def test_no_answer_moves_the_cursor(text: str) -> None:
    """Control characters, old and new, are replaced; lines, tabs and letters of every script stay."""
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", inert(text))
    assert inert("Größe\n\t東京 👩‍👩‍👧") == "Größe\n\t東京 👩‍👩‍👧"


def test_colours_end_with_their_line() -> None:
    """No colour spills over a line's end, on terminals of 256 colours too."""
    for has_true_colour in (False, True):
        painted = Palette(has_colours=True, has_true_colour=has_true_colour).source("a\nb\n", "medusa")
        assert ESCAPE.sub("", painted) == "a\nb\n"
        assert all(line.endswith("\x1b[0m") for line in painted.split("\n")[:-1])
    assert Palette(has_colours=True).source("own", "target") == "own"


def test_a_speculation_is_a_name_or_a_config() -> None:
    """A name stays a name; JSON becomes a config; nothing leaves it to the service."""
    assert parse_speculation("ngram") == "ngram"
    assert parse_speculation('{"method": "ngram", "max_n": 2}') == {"method": "ngram", "max_n": 2}
    assert parse_speculation("") is None
