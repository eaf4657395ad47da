"""The command: what it offers, and that what needs an engine's libraries runs apart from the service."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from service.__main__ import APART, main
from service.chat_command import chat_parser
from service.experiments.commands import experiment_parser, report_parser
from service.service_url import URL_VARIABLE, service_url
from service.settings import load_settings, settings_parser


@pytest.mark.parametrize("command", APART)
def test_commands_that_load_an_engine_say_what_they_take(command: str) -> None:
    """`fetch`, `train`, `eval` and `simulate` are there, with help of their own, and pass exit statuses on."""
    run = [sys.executable, "-c", "from service.__main__ import main; raise SystemExit(main())", command]
    helped = subprocess.run([*run, "--help"], capture_output=True, text=True, check=False)
    assert helped.returncode == 0, helped.stderr
    assert "usage:" in helped.stdout
    assert subprocess.run([*run, "--nonsense"], capture_output=True, check=False).returncode == 2


def test_every_command_is_in_the_overview(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a command the list of them is shown; an unknown one is named."""
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {command} " in shown for command in ("serve", "engine", "chat", "report", *APART))
    assert main(["trian"]) == 2
    assert "'trian' is not a command" in capsys.readouterr().err


def test_the_command_itself_loads_no_engine() -> None:
    """Offering these commands costs the service none of their libraries."""
    code = "import service.__main__, sys; raise SystemExit(any(m in sys.modules for m in ('torch', 'numba')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """`forerun --version` prints the distribution's version."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"forerun {metadata.version('forerun')}\n"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("forerun e", {"engine", "eval", "experiment"}),
        ("forerun serve --log-f", {"--log-format"}),
        ("forerun serve --backend t", {"torch", "triton"}),
        ("forerun experiment cr", {"create"}),
        ("forerun chat --temp", {"--temperature"}),
    ],
)
def test_the_shell_completes_commands_flags_and_values(line: str, expected: set[str], tmp_path: Path) -> None:
    """What argcomplete asks the command for has commands, flags and allowed values."""
    asked = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_SHELL": "bash",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "words"),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    code = "from service.__main__ import main; main()"
    subprocess.run([sys.executable, "-c", code], env=os.environ | asked, check=False)
    assert set((tmp_path / "words").read_text().split()) == expected


@pytest.mark.parametrize(
    ("given", "url"),
    [
        (None, "http://127.0.0.1:8000"),
        ("127.0.0.1:9", "http://127.0.0.1:9"),
        ("localhost:9/", "http://localhost:9"),
        ("http://h:9/v1", "http://h:9"),
        ("https://h/under/v1/", "https://h/under"),
    ],
)
def test_an_address_needs_neither_scheme_nor_end(given: str | None, url: str) -> None:
    """A URL is taken with or without scheme, slash and `/v1`."""
    assert service_url(given, {}) == url
    assert service_url(None, {URL_VARIABLE: given or ""}) == url


def test_the_variable_is_the_default_and_the_flag_wins() -> None:
    """`FORERUN_URL` holds where `--url` is not given, and a service that is started in that shell does not mind it."""
    assert service_url("a:1", {URL_VARIABLE: "b:2"}) == "http://a:1"
    load_settings([], {URL_VARIABLE: "b:2"})


@pytest.mark.parametrize(
    "arguments",
    [
        ["--url", "a:1", "list"],
        ["list", "--url", "a:1"],
        ["watch", "--url", "a:1", "x"],
        ["watch", "x", "--url", "a:1"],
    ],
)
def test_the_address_may_stand_anywhere(arguments: list[str]) -> None:
    """`--url` and `--api-key` are taken before the subcommand and after it."""
    chosen = experiment_parser().parse_args([*arguments, "--api-key", "k"])
    assert (chosen.url, chosen.api_key) == ("a:1", "k")
    assert experiment_parser().parse_args(["list"]).url is None


def test_help_names_allowed_values_and_real_defaults() -> None:
    """Flags show their allowed values; what has no default is unset; a method is shown by its name."""
    shown = " ".join(settings_parser("forerun serve").format_help().split())
    assert "--backend {auto,torch,native,triton,flashinfer}" in shown
    assert "--log-format {auto,json,console}" in shown
    assert "(default: none)" not in shown.replace('"none"', "")
    assert "(default: unset)" in shown
    assert "(default: auto)" in shown


def test_an_engine_s_help_is_its_own() -> None:
    """It says what an engine is and lists no flag of the front's; those are accepted all the same."""
    shown = " ".join(settings_parser("forerun engine").format_help().split())
    assert "answers no client" in shown
    assert "--listen" in shown
    assert "--load-seconds" in shown
    assert not any(flag in shown for flag in ("--port PORT", "--max-stop-strings", "--audit-share", "--routing"))
    assert "--listen" not in " ".join(settings_parser("forerun serve").format_help().split())
    load_settings(["--port", "9"], {}, program="forerun engine")


@pytest.mark.parametrize("parser", [chat_parser(), experiment_parser(), report_parser()], ids=lambda one: one.prog)
def test_every_flag_of_a_command_is_explained(parser: argparse.ArgumentParser) -> None:
    """No flag or argument of the commands for a running service is without a help text."""
    pending = [parser]
    while pending:
        for action in pending.pop()._actions:
            if isinstance(action, argparse._SubParsersAction):
                pending += action.choices.values()
            else:
                assert action.help, (parser.prog, action.dest)
