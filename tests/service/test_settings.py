"""Settings: where they come from, in which order, and what is said of wrong ones."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from service.__main__ import main
from service.settings import Settings, SettingsError, load_settings, options
from speculation.messages import NgramConfig, NoSpeculation
from speculation.settings import EngineSettings


def test_without_anything_the_defaults_hold() -> None:
    """No flag, variable or file gives the tree's defaults, which listen on this machine only."""
    settings = load_settings([], {"PATH": "x", "FORERUN_API_KEY": "of the commands that ask a service"})
    assert settings == Settings()
    assert settings.server.host == "127.0.0.1"


def test_the_later_source_wins(tmp_path: Path) -> None:
    """A file beats the defaults, a variable the file, a flag the variable; each leaves the rest alone."""
    file = tmp_path / "forerun.toml"
    file.write_text('[server]\nport = 1\nhost = "0.0.0.0"\nmodel_name = "m"\n[engine]\nnum_blocks = 10\n')
    settings = load_settings(["--config", str(file), "--port", "3"], {"FORERUN_PORT": "2", "FORERUN_HOST": "::1"})
    assert (settings.server.port, settings.server.host, settings.server.model_name) == (3, "::1", "m")
    assert settings.engine.num_blocks == 10
    assert load_settings([], {"FORERUN_CONFIG": str(file)}).server.port == 1


def test_none_turns_off_what_may_be_absent(tmp_path: Path) -> None:
    """In the file, a variable or a flag "none" is no head and no limit, whatever an earlier source said."""
    file = tmp_path / "forerun.toml"
    file.write_text('[engine]\neagle3 = "none"\nmedusa = "heads"\nnum_threads = 2\n')
    assert load_settings(["--config", str(file)], {}).engine.eagle3 is None
    assert load_settings([], {"FORERUN_EAGLE3": "none"}).engine.eagle3 is None
    assert load_settings(["--eagle3", "none"], {"FORERUN_EAGLE3": "a folder"}).engine.eagle3 is None
    assert load_settings(["--config", str(file), "--eagle3", "auto"], {}).engine.eagle3 == "auto"
    engine = load_settings(["--config", str(file), "--num-threads", "none"], {"FORERUN_MEDUSA": "none"}).engine
    assert (engine.medusa, engine.num_threads) == (None, None)


def test_profiles_and_speculation_are_configs(tmp_path: Path) -> None:
    """A speculation config is a table, JSON or a method's name, and the file can name several as profiles."""
    file = tmp_path / "forerun.toml"
    file.write_text('[engine]\nspeculation = "none"\n[profiles.fast]\nmethod = "ngram"\nmax_n = 4\n')
    settings = load_settings(["--config", str(file)], {})
    assert settings.engine.speculation == NoSpeculation()
    assert settings.profiles == {"fast": NgramConfig(max_n=4)}
    flag = load_settings(["--speculation", '{"method": "ngram", "min_n": 2}'], {})
    assert flag.engine.speculation == NgramConfig(min_n=2)
    file.write_text('[engine.speculation]\nmethod = "ngram"\nmax_n = 5\n')
    assert load_settings([], {"FORERUN_CONFIG": str(file)}).engine.speculation == NgramConfig(max_n=5)


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        (["--prot", "1"], {}, "--prot is not a flag; did you mean '--port'?"),
        (["serve"], {}, "serve is not a flag"),
        ([], {"FORERUN_PROT": "1"}, "FORERUN_PROT is not a setting; did you mean 'FORERUN_PORT'?"),
        (["--port", "70000"], {}, '--port: server.port is "70000": it must be an integer <= 65535'),
        ([], {"FORERUN_PORT": "many"}, 'FORERUN_PORT: server.port is "many": it must be an integer'),
        (["--stall-seconds", "nan"], {}, "--stall-seconds: server.stall_seconds"),
        (["--max-logprobs", "1001"], {}, 'limits.max_logprobs is "1001": it must be an integer <= 1000'),
        (["--num-blocks", "1"], {}, "it must be an integer >= 2"),
        (["--num-threads", "0"], {}, 'it must be an integer >= 1, or "none"'),
        (["--eagle3", ""], {}, '--eagle3: engine.eagle3 is "": it must be a string of length >= 1, or "none"'),
        ([], {"FORERUN_MEDUSA": ""}, 'FORERUN_MEDUSA: engine.medusa is ""'),
        (["--draft-model", ""], {}, "engine.draft_model"),
        (["--port", "none"], {}, "it must be an integer"),
        (["--dtype", "int3"], {}, "known are 'auto'"),
        (["--device", "gpu"], {}, "engine.device"),
        (["--speculation", "magic"], {}, "known are 'none', 'ngram'"),
        (["--speculation", "{oops"], {}, "not valid JSON"),
        (["--config", "/nowhere/forerun.toml"], {}, "No such file"),
    ],
)
def test_a_wrong_setting_is_named(arguments: list[str], environment: dict[str, str], says: str) -> None:
    """The error says which source and which setting, and what would be right."""
    with pytest.raises(SettingsError, match=re.escape(says)):
        load_settings(arguments, environment)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[serve]\n", "[serve] is not a section; did you mean 'server'?"),
        ("[server]\nprot = 1\n", "server.prot is not a setting; did you mean 'port'?"),
        ("server = 3\n", "server is 3; it must be a table"),
        ("[server]\nport = 70000\n", "server.port is 70000: it must be an integer <= 65535"),
        ('[profiles.fast]\nmethod = "magic"\n', "known are 'none'"),
        ('[profiles.ngram]\nmethod = "none"\n', "is a method"),
        ('[profiles."<b>"]\nmethod = "none"\n', "letters, digits"),
        ('[engine]\neagle3 = ""\n', 'engine.eagle3 is ""'),
        ("[server\n", "forerun.toml"),
    ],
)
def test_a_wrong_settings_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    """Unknown sections, unknown keys and wrong values are errors with the nearest known name or the right kind."""
    file = tmp_path / "forerun.toml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=re.escape(says)):
        load_settings(["--config", str(file)], {})


def test_help_explains_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    """Each setting is in the help of the service or of an engine alone, with what it is for and its default."""
    for program in ("forerun serve", "forerun engine"):
        with pytest.raises(SystemExit):
            load_settings(["--help"], {}, program=program)
    text = " ".join(capsys.readouterr().out.split())
    for option in options():
        assert option.flag in text
        assert " ".join(option.description.split()) in text
    assert "default: 127.0.0.1" in text


def test_names_of_settings_are_unique() -> None:
    """A flag means one setting, whatever its section."""
    names = [option.name for option in options()]
    assert len(set(names)) == len(names)


def test_an_engine_gets_its_settings_as_json() -> None:
    """What is written for the engine is what it reads."""
    settings = EngineSettings(num_blocks=64, speculation=NgramConfig(max_n=4), kv_memory=1 << 40)
    assert msgspec.json.decode(msgspec.json.encode(settings), type=EngineSettings) == settings


def test_the_command_says_what_it_can(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a command there is help; an unknown one, or a wrong flag, is status 2 with a reason."""
    assert main([]) == 0
    assert "serve" in capsys.readouterr().out
    assert main(["sevre"]) == 2
    assert "sevre" in capsys.readouterr().err
    assert main(["serve", "--prot", "1"]) == 2
    assert "--port" in capsys.readouterr().err


def test_the_module_is_the_serve_command() -> None:
    """`python -m service` takes the flags of `forerun serve`."""
    done = subprocess.run(
        [sys.executable, "-m", "service", "--prot", "1"], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, "did you mean '--port'?" in done.stderr) == (2, True)
