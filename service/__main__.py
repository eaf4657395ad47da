"""The command: `forerun serve`, `fetch`, …; `python -m service` is the same as `forerun serve`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from typing import NoReturn

from service.settings import SettingsError, load_settings

USAGE = """usage: forerun COMMAND [flags]
       forerun --version

commands:
  serve       serve a model over REST and WebSocket; `forerun serve --help` explains every setting
  engine      run one engine alone, on a machine of its own; fronts find it in the store
  fetch       fetch and convert the embedded model, so that the first start is quick
  train       train a head or Medusa heads for a target on its own answers
  eval        how often a head's or draft model's guesses are accepted, by position
  simulate    replay recorded token sequences through lookup proposers, without a model
  chat        talk to a running service; tokens in the colour of what guessed them
  experiment  create, list, watch, stop and promote A/B experiments of a running service
  report      write an experiment's report as one HTML file
"""

APART = {
    "fetch": "target.embedded",
    "train": "speculation.train",
    "eval": "speculation.evaluate",
    "simulate": "speculation.simulate",
}
"""Commands that load an engine's libraries, and their modules."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status."""
    command, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    match command:
        case "serve":
            return serve(rest)
        case "engine":
            return engine(rest)
        case "fetch" | "train" | "eval" | "simulate":
            run_apart(APART[command], rest)
        case "chat":
            return chat(rest)
        case "experiment" | "report":
            return experiments(command, rest)
        case "--help" | "-h":
            print(USAGE)
            return 0
        case "--version":
            print(f"forerun {version('forerun')}")
            return 0
    print(f"forerun: {command!r} is not a command\n\n{USAGE}", file=sys.stderr)
    return 2


def serve(arguments: Sequence[str]) -> int:
    """Serve until stopped."""
    from service.server import serve as run_server

    try:
        settings = load_settings(arguments, os.environ)
    except SettingsError as error:
        print(f"forerun serve: {error}", file=sys.stderr)
        return 2
    return asyncio.run(run_server(settings, partial(print, flush=True)))


def engine(arguments: Sequence[str]) -> int:
    """Run one engine alone, for fronts that find it in the store."""
    from service.file_limit import raise_file_limit
    from service.pool.standalone import run_engine

    try:
        settings = load_settings(arguments, os.environ, program="forerun engine")
    except SettingsError as error:
        print(f"forerun engine: {error}", file=sys.stderr)
        return 2
    raise_file_limit()
    return asyncio.run(run_engine(settings, partial(print, flush=True)))


def run_apart(module: str, arguments: Sequence[str]) -> NoReturn:
    """Become a module of the engine's side: whoever ends this process ends that one, and no child works on."""
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])  # noqa: S606  no shell is meant


def chat(arguments: Sequence[str]) -> int:
    """Talk to a running service."""
    from service.chat_command import main as run_chat

    return run_chat(arguments)


def experiments(command: str, arguments: Sequence[str]) -> int:
    """Ask a running service about its experiments, or change them."""
    from service.experiments.commands import experiment_command, report_command

    run = report_command if command == "report" else experiment_command
    return run(arguments, partial(print, flush=True))


if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
