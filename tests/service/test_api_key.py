"""Where a command has its API key from."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from service.api_key import ApiKeyError, add_key_flags, authorization, key_of

ENVIRONMENT = {"FORERUN_API_KEY": "of-the-shell"}


def key(*arguments: str, **environment: str) -> str | None:
    parser = argparse.ArgumentParser()
    add_key_flags(parser)
    return key_of(parser.parse_args(arguments), environment)


def test_a_flag_comes_before_the_variable(tmp_path: Path) -> None:
    """Flag or file, else the variable, else none; what surrounds a key in a file is not part of it."""
    (tmp_path / "key").write_text("of-the-file\n")
    assert key("--api-key", "of-the-flag", **ENVIRONMENT) == "of-the-flag"
    assert key("--api-key-file", str(tmp_path / "key"), **ENVIRONMENT) == "of-the-file"
    assert key(**ENVIRONMENT) == "of-the-shell"
    assert key(FORERUN_API_KEY="") is None
    assert key() is None


@pytest.mark.parametrize("given", ["", " ", "two words", "line\r\nX-Other: 1", "bell\a"])
def test_what_is_no_key_is_refused_and_not_repeated(given: str, tmp_path: Path) -> None:
    """The error says where it came from, and shows nothing of what may be a secret."""
    (tmp_path / "key").write_text(given)
    for arguments in (("--api-key", given), ("--api-key-file", str(tmp_path / "key"))):
        with pytest.raises(ApiKeyError, match="a key is one word") as caught:
            key(*arguments)
        assert arguments[0] in str(caught.value)
        assert not given.strip() or given not in str(caught.value)


def test_without_a_key_nothing_is_sent() -> None:
    """A service that wants none is told none."""
    assert authorization(None) == {}
    assert authorization("a") == {"Authorization": "Bearer a"}
