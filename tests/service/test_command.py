"""The command: what it offers, and that what needs an engine's libraries runs apart from the service."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

from service.__main__ import APART, main


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


def test_the_version_is_the_installed_one(capsys: pytest.CaptureFixture[str]) -> None:
    """`forerun --version` prints the version of the installed distribution and ends with status 0."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"forerun {version('forerun')}\n"


def test_the_command_itself_loads_no_engine() -> None:
    """Offering these commands costs the service none of their libraries."""
    code = "import service.__main__, sys; raise SystemExit(any(m in sys.modules for m in ('torch', 'numba')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
