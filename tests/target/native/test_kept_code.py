"""Machine code on disk: whatever is wrong with it costs a compilation, and nobody else's code is run."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from target.native.compiling import c_function, kept_in, native
from target.native.kept_code import CodeFolder, code_folder


def make_double() -> Any:
    """A new function each time, so that it has to be compiled or read."""

    def double(number: int) -> int:
        return 2 * number

    return native(double)


def call_in(cache_dir: Path) -> bool:
    """Compile or read one function and one C function as a new process would; whether the function was read."""
    code_folder.cache_clear()
    double = make_double()
    with kept_in(cache_dir, double):

        def nothing(_number: int) -> None:
            return

        assert c_function(nothing, 1).address
        assert double(21) == 42
    return bool(double.stats.cache_hits)


def kept_files(cache_dir: Path) -> list[Path]:
    return sorted(cache_dir.rglob("*.code"))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x55
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def test_code_is_kept_for_its_owner_alone(tmp_path: Path) -> None:
    """The second process reads what the first compiled; nobody but the owner may read or change it."""
    assert not call_in(tmp_path)
    files = kept_files(tmp_path)
    assert len(files) == 2
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert files[0].parent.stat().st_mode & 0o777 == 0o700
    assert call_in(tmp_path)


@pytest.mark.parametrize("damage", [truncate, flip, empty])
def test_damaged_code_is_compiled_again(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """A damaged file is reported once with its folder, compiled again, and replaced by a whole one."""
    call_in(tmp_path)
    for path in kept_files(tmp_path):
        damage(path)
    with caplog.at_level(logging.WARNING):
        assert not call_in(tmp_path)
    assert len(caplog.messages) == 1
    assert f"the folder of compiled code {kept_files(tmp_path)[0].parent} could not be used" in caplog.text
    assert "is damaged" in caplog.text
    assert call_in(tmp_path)


def test_code_that_others_could_have_written_is_not_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file or folder that others may change, or of another user, is never unpickled; the log says what to do."""
    call_in(tmp_path)
    monkeypatch.setattr(pickle, "loads", lambda content: pytest.fail("unpickled"))
    folder = kept_files(tmp_path)[0].parent
    folder.chmod(0o770)
    assert not call_in(tmp_path)
    assert f"{folder} can be changed by others (mode 770); `chmod go-w` makes it usable" in caplog.text
    folder.chmod(0o700)
    for path in kept_files(tmp_path):
        path.chmod(0o622)
    caplog.clear()
    assert not call_in(tmp_path)
    assert "can be changed by others (mode 622)" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_code_of_another_user_is_not_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file of another user, though whole and private, is never unpickled."""
    call_in(tmp_path)
    for path in kept_files(tmp_path):
        os.chown(path, 12345, 12345)
    monkeypatch.setattr(pickle, "loads", lambda content: pytest.fail("unpickled"))
    assert not call_in(tmp_path)
    assert "belongs to user 12345; it must belong to this user or to root" in caplog.text


def test_a_file_under_another_name_is_refused(tmp_path: Path) -> None:
    """Whole code of one function is not taken for another's, and a link is not followed."""
    folder = CodeFolder(tmp_path / "code")
    folder.write("one", b"content")
    assert folder.read("one") == b"content"
    assert folder.read("absent") is None
    (folder.path / "one").rename(folder.path / "two")
    with pytest.raises(ValueError, match="two is damaged"):
        folder.read("two")
    (folder.path / "three").symlink_to(folder.path / "two")
    with pytest.raises(OSError, match="three"):
        folder.read("three")


def test_a_full_disk_costs_a_compilation(tmp_path: Path) -> None:
    """Where no byte can be written the function is compiled and runs, the log says so, and no part of a file stays."""
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from tests.target.native.test_kept_code import call_in\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "assert not call_in(Path(sys.argv[1]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the folder of compiled code") == 1
    assert "OSError" in done.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_the_sampler_s_code_is_kept_in_the_given_folder(tmp_path: Path) -> None:
    """A process that is told its cache folder keeps the sampler's code there, and leaves the default folder alone."""
    code = (
        "import sys; from pathlib import Path; from target.sampling import compile_sampler; "
        "compile_sampler(Path(sys.argv[1]))"
    )
    environment = os.environ | {"HOME": str(tmp_path / "home"), "FORERUN_CACHE_DIR": str(tmp_path / "default")}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "own")], env=environment, check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["own"]
    assert len(kept_files(tmp_path / "own")) == 1


def test_code_of_versions_nobody_uses_is_removed(tmp_path: Path) -> None:
    """A new version's first write removes folders unused for 30 days; one used since stays, and so does all else."""
    unused, used, other = (tmp_path / "native" / name for name in ("0" * 16, "1" * 16, "notes"))
    for path in (unused, used, other):
        path.mkdir(parents=True)
        (path / "content").write_text("kept")
        os.utime(path, (0, 0))
    CodeFolder(used).mark_used()
    CodeFolder(tmp_path / "native" / ("2" * 16)).write("name", b"content")
    assert sorted(path.name for path in (tmp_path / "native").iterdir()) == ["1" * 16, "2" * 16, "notes"]


def test_a_start_marks_its_folder_as_used(tmp_path: Path) -> None:
    """Reading kept code sets the folder's time, so that versions in use are not removed."""
    call_in(tmp_path)
    (folder,) = (tmp_path / "native").iterdir()
    os.utime(folder, (0, 0))
    assert call_in(tmp_path)
    assert folder.stat().st_mtime > 0
