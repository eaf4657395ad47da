"""`forerun chat`: the playground in a terminal. Each token has the colour of where it came from, as on the page."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

import aiohttp
import msgspec

from service.api_key import API_KEY_VARIABLE, ApiKeyError, authorization, key_of
from service.service_url import add_service_flags, service_url

SOURCE_COLOURS: Mapping[str, tuple[str, str]] = {
    "ngram": ("#2563c9", "#7fb0ff"),
    "suffix": ("#0b7d72", "#4fd1c2"),
    "prediction": ("#7a45cf", "#b99aff"),
    "draft_model": ("#a86100", "#f0b457"),
    "medusa": ("#bf3167", "#ff8fb4"),
    "eagle3": ("#4a7d14", "#a5d86e"),
}
"""On light and on dark ground. Tokens of the target itself have the terminal's own colour."""

HELP = """/help        show this
/use NAME    speculation: a profile, a method, or a config as JSON; /use alone leaves it to the service
/new         forget the conversation
/quit        leave, as Ctrl-D does; Ctrl-C ends an answer"""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""What would move a cursor, change a colour or turn text around, were a model to say it."""


class ChatError(Exception):
    """What the user is told; the conversation can go on."""


class Palette:
    """Colours for one terminal, or none at all."""

    def __init__(self, *, has_colours: bool, is_light: bool = False, has_true_colour: bool = True) -> None:
        self._has_colours = has_colours
        self._ground = 0 if is_light else 1
        self._has_true_colour = has_true_colour

    @classmethod
    def of(cls, out: IO[str], environment: Mapping[str, str]) -> Palette:
        """What `out` can show: nothing on a pipe, nor where NO_COLOR is set [no-color.org]."""
        is_plain = not out.isatty() or bool(environment.get("NO_COLOR")) or environment.get("TERM") == "dumb"
        return cls(
            has_colours=not is_plain,
            is_light=environment.get("COLORFGBG", "").rpartition(";")[2] in {"7", "15"},
            has_true_colour=environment.get("COLORTERM", "") in {"truecolor", "24bit"},
        )

    def source(self, text: str, source: str) -> str:
        """Text in the colour of its source."""
        if source not in SOURCE_COLOURS:
            return text
        value = SOURCE_COLOURS[source][self._ground]
        red, green, blue = (int(value[i : i + 2], 16) for i in (1, 3, 5))
        if self._has_true_colour:
            return self._painted(text, f"38;2;{red};{green};{blue}")
        # The nearest of the 6 x 6 x 6 cube that every terminal of 256 colours has.
        cube = 16 + 36 * round(red / 51) + 6 * round(green / 51) + round(blue / 51)
        return self._painted(text, f"38;5;{cube}")

    def faint(self, text: str) -> str:
        return self._painted(text, "2")

    def _painted(self, text: str, code: str) -> str:
        if not self._has_colours or not text:
            return text
        # A line that ends while a colour is on would paint the rest of the terminal's row.
        return "\n".join(f"\x1b[{code}m{line}\x1b[0m" if line else "" for line in text.split("\n"))


class Token(msgspec.Struct, frozen=True):
    """Of a `tokens` message, what is needed here."""

    source: str
    offset: int


class AnswerText:
    """Cuts the text of one answer into its tokens. Text before the next token belongs to the one before."""

    def __init__(self) -> None:
        self.text = ""
        self.sources: Counter[str] = Counter()
        self._source = "target"

    def add(self, text: str, tokens: Sequence[Token]) -> list[tuple[str, str]]:
        """Pieces of new text, each with its source, in order."""
        start = len(self.text)
        pieces = []
        cut = 0
        for token in tokens:
            begin = max(token.offset - start, cut)
            pieces.append((text[cut:begin], self._source))
            cut, self._source = begin, token.source
            self.sources[token.source] += 1
        self.text += text
        return [(piece, source) for piece, source in [*pieces, (text[cut:], self._source)] if piece]


class Chat:
    """A conversation with the service at an address."""

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any],
        out: IO[str],
        palette: Palette,
        *,
        system: str | None = None,
        key: str | None = None,
    ) -> None:
        """`options` are fields of the request. Colours and texts go to `out`. `key`: for a service that wants one."""
        self.speculation: object = None
        """Of the next request; None leaves it to the service."""
        self._url = f"{url}/v1/stream"
        self._options = options
        self._headers = authorization(key)
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self._messages: list[dict[str, str]] = list(self._first)
        self._out = out
        self._palette = palette

    def forget(self) -> None:
        self._messages = list(self._first)

    async def ask(self, question: str) -> str:
        """Print the answer as it comes, and return what there is to say about it.

        SIGINT ends the answer, not the program. Raises `ChatError` where there is none.
        """
        messages = [*self._messages, {"role": "user", "content": question}]
        request = {"messages": messages, **self._options}
        if self.speculation is not None:
            request["speculation"] = self.speculation
        answer = AnswerText()
        try:
            async with aiohttp.ClientSession(headers=self._headers) as session, session.ws_connect(self._url) as socket:
                await socket.send_json({"type": "generate", "id": "chat", "request": request})
                finished = await self._read(socket, answer)
        except aiohttp.WSServerHandshakeError as error:
            if error.status == 401:
                remedy = f"give one with --api-key, --api-key-file or {API_KEY_VARIABLE}"
                raise ChatError(f"{self._url} answers 401: API key missing or wrong; {remedy}") from error
            raise ChatError(f"{self._url} answers {error.status}") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ChatError(f"no answer from {self._url}: {error}") from error
        self._messages = [*messages, {"role": "assistant", "content": answer.text}]
        return summary(finished, answer.sources, self._palette)

    async def _read(self, socket: aiohttp.ClientWebSocketResponse, answer: AnswerText) -> dict[str, Any]:
        with _on_interrupt(lambda: socket.send_json({"type": "cancel", "id": "chat"})):
            async for message in socket:
                if message.type is not aiohttp.WSMsgType.TEXT:
                    break
                body = msgspec.json.decode(message.data)
                match body["type"]:
                    case "tokens":
                        self._show(answer.add(body["text"], msgspec.convert(body["tokens"], list[Token])))
                    case "finished":
                        self._out.write("\n")
                        return dict(body)
                    case "error":
                        raise ChatError(inert(body["error"]["message"]))
        raise ChatError("the service ended the connection")

    def _show(self, pieces: Sequence[tuple[str, str]]) -> None:
        self._out.write("".join(self._palette.source(inert(piece), source) for piece, source in pieces))
        self._out.flush()


def inert(text: str) -> str:
    """Text that does nothing to a terminal but stand there."""
    return _CONTROL.sub("�", text)


def summary(finished: Mapping[str, Any], sources: Mapping[str, int], palette: Palette) -> str:
    """How an answer went, on one line."""
    timing, guessed = finished["metrics"]["timing"], finished["metrics"]["speculative_decoding"]
    parts = [f"{finished['usage']['completion_tokens']} tokens"]
    if timing["tpot"] > 0.0001:  # what came all at once has no speed
        parts.append(f"{1 / timing['tpot']:.1f} tokens/s")
    parts.append(f"first after {1000 * timing['ttft']:.0f} ms")
    if guessed["num_spec_steps"]:
        parts.append(f"mean acceptance length {guessed['mean_acceptance_length']:.2f}")
        parts.append(f"saved {1000 * guessed['saved_seconds']:.0f} ms")
    if finished["choices"][0]["finish_reason"] == "abort":
        parts.append("cancelled")
    parts.append(f"seed {finished['seed']}")
    legend = ", ".join(palette.source(f"{inert(source)} {count}", source) for source, count in sorted(sources.items()))
    return palette.faint(" · ".join(parts)) + (f"\n{legend}" if legend else "")


def chat_command(
    arguments: Sequence[str],
    *,
    read: Callable[[], str | None],
    is_interactive: bool,
    out: IO[str],
    errors: IO[str],
    environment: Mapping[str, str] = os.environ,
) -> int:
    """`forerun chat`; the exit status.

    `read` gives the next line of a person (None at the end), or, where that is not interactive, all there is to ask.
    Answers go to `out`; what is said about them, to `errors`.
    """
    chosen = chat_parser().parse_args(arguments)
    names = ("temperature", "top_p", "max_tokens", "seed", "cache_salt")
    options = {name: value for name in names if (value := getattr(chosen, name)) is not None}
    notes = Notes(errors, Palette.of(errors, environment))
    try:
        key = key_of(chosen, environment)
        url, palette = service_url(chosen.url, environment), Palette.of(out, environment)
        chat = Chat(url, options, out, palette, system=chosen.system, key=key)
        chat.speculation = parse_speculation(chosen.speculation)
    except (ChatError, ApiKeyError) as error:
        notes.error(error)
        return 2
    if chosen.prompt or not is_interactive:
        question = " ".join(chosen.prompt) or (read() or "").strip()
        return 0 if not question or _answer(chat, question, notes) else 1
    notes.say("/help lists what can be typed beside questions")
    while (line := read()) is not None:
        if not line.startswith("/"):
            if line.strip():
                _answer(chat, line.strip(), notes)
        elif not _obey(chat, line.strip(), notes):
            break
    return 0


class Notes:
    """What is said beside the answers."""

    def __init__(self, errors: IO[str], palette: Palette) -> None:
        self._errors = errors
        self._palette = palette

    def say(self, text: str) -> None:
        print(self._palette.faint(text), file=self._errors, flush=True)

    def report(self, text: str) -> None:
        print(text, end="\n\n", file=self._errors, flush=True)

    def error(self, error: Exception) -> None:
        print(f"forerun chat: {error}", file=self._errors, flush=True)


def parse_speculation(text: str | None) -> object:
    """A name as it is, a config from JSON, None for nothing. Raises `ChatError` for JSON that is none."""
    if not text:
        return None
    if not text.startswith("{"):
        return text
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ChatError(f"speculation is {text!r}, which is not valid JSON: {error}") from error


def _answer(chat: Chat, question: str, notes: Notes) -> bool:
    try:
        notes.report(asyncio.run(chat.ask(question)))
    except ChatError as error:
        notes.error(error)
        return False
    except KeyboardInterrupt:
        notes.error(ChatError("cancelled before the answer began"))
        return False
    return True


def _obey(chat: Chat, line: str, notes: Notes) -> bool:
    """Do what a line that begins with / asks for; whether the conversation goes on."""
    command, _, rest = line.partition(" ")
    match command:
        case "/quit" | "/exit":
            return False
        case "/new":
            chat.forget()
        case "/use":
            try:
                chat.speculation = parse_speculation(rest.strip())
            except ChatError as error:
                notes.error(error)
        case "/help":
            notes.say(HELP)
        case _:
            notes.error(ChatError(f"{command} is not a command; known are\n{HELP}"))
    return True


@contextmanager
def _on_interrupt(start: Callable[[], Coroutine[Any, Any, None]]) -> Iterator[None]:
    """While this is entered, SIGINT starts a coroutine instead of ending the program."""
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()
    try:
        loop.add_signal_handler(signal.SIGINT, lambda: tasks.add(loop.create_task(start())))
    except (NotImplementedError, RuntimeError, ValueError):
        # Not on this system, or not the main thread: SIGINT does what it does.
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def chat_parser() -> argparse.ArgumentParser:
    """The command line of `forerun chat`."""
    parser = argparse.ArgumentParser(
        prog="forerun chat",
        description="Chat with a running service. Each token has the colour of the proposer that guessed it.",
        epilog="A question given as words or on a pipe is answered once; answers go to stdout, the rest to stderr.",
    )
    parser.add_argument("prompt", nargs="*", metavar="QUESTION", help="question; without one they are read one by one")
    add_service_flags(parser)
    parser.add_argument(
        "--speculation", help="a profile, a method, or a config as JSON (default: what the service is set to)"
    )
    parser.add_argument("--temperature", type=float, help="from 0 (greedy) to 2 (default: the model's)")
    parser.add_argument("--top-p", type=float, help="from 0 to 1 (default: the model's)")
    parser.add_argument("--max-tokens", type=int, help="maximum tokens of an answer (default: what the context holds)")
    parser.add_argument("--seed", type=int, help="seed of each answer (default: random)")
    parser.add_argument("--system", help="system message (default: unset)")
    parser.add_argument("--cache-salt", help="share cached prompts only with requests of this salt (default: unset)")
    return parser


def main(arguments: Sequence[str]) -> int:
    """`forerun chat` on this process's own terminal or pipes."""
    is_interactive = sys.stdin.isatty()

    def read() -> str | None:
        if not is_interactive:
            return sys.stdin.read()
        try:
            return input("› ")
        except (EOFError, KeyboardInterrupt):
            return None

    with suppress(ImportError):
        import readline  # noqa: F401 - gives `input` a history and editing
    return chat_command(arguments, read=read, is_interactive=is_interactive, out=sys.stdout, errors=sys.stderr)
