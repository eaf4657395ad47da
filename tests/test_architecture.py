"""The package graph of docs/architecture.md, read off the source, and what every file of the project must keep to."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent

MAY_IMPORT = {
    "service": {
        "service",
        "speculation.messages",
        "speculation.framing",
        "speculation.log_format",
        "speculation.recording",
        "speculation.settings",
        "cache_store",
    },
    "speculation": {"speculation", "draft", "target", "cache_store"},
    "draft": {"draft", "target", "cache_store"},
    "target": {"target"},
    "cache_store": {"cache_store"},
}
"""What a room's modules may import of the project: whole rooms, or single modules."""

EXCEPTIONS: dict[str, set[str]] = {}
"""Modules that may import more, each with the reason beside it."""

MAY_IMPORT_TORCH = {"target", "draft", "speculation.engine", "speculation.drafting"}

HEAVY = ("torch", "numba", "transformers")
"""What the process that answers clients must never load: seconds of start-up and hundreds of megabytes."""


def modules_of(*rooms: str) -> dict[str, Path]:
    """Dotted name and file of every module in the rooms."""
    found = {}
    for room in rooms:
        for path in sorted((ROOT / room).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(name: str, path: Path) -> Iterator[str]:
    """Every module that a file imports, anywhere in it; `from a import b` counts as a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
            base = package[: len(package) - node.level + 1] if node.level else []
            yield from (".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names)


def is_within(module: str, allowed: set[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in allowed)


MODULES = modules_of(*MAY_IMPORT)


@pytest.mark.parametrize("name", MODULES)
def test_a_room_imports_only_what_lies_below_it(name: str) -> None:
    """Service, speculation, draft, target, in that order, with cache_store a leaf: no import goes back."""
    allowed = MAY_IMPORT[name.split(".")[0]] | EXCEPTIONS.get(name, set())
    ours = {module for module in imports_of(name, MODULES[name]) if module.split(".")[0] in {*MAY_IMPORT, "tests"}}
    assert {module for module in ours if not is_within(module, allowed)} == set()


@pytest.mark.parametrize("name", MODULES)
def test_torch_stays_in_its_rooms(name: str) -> None:
    """Tensors exist in target, in draft, and in the engine modules that call the verifier."""
    imports_torch = any(is_within(module, {"torch"}) for module in imports_of(name, MODULES[name]))
    assert not imports_torch or is_within(name, MAY_IMPORT_TORCH)


def test_no_exception_is_stale() -> None:
    """An exception to the graph names a module that exists and uses it."""
    for name, extra in EXCEPTIONS.items():
        used = set(imports_of(name, MODULES[name]))
        assert all(any(is_within(module, {one}) for module in used) for one in extra), name


def test_the_front_loads_no_engine_library() -> None:
    """Importing any module of the service, directly or through others, loads no torch, numba or transformers."""
    names = [
        name
        for name in [*modules_of("service", "cache_store"), "speculation.messages", "speculation.framing"]
        if "__main__" not in name
    ]
    code = f"""
import importlib, json, sys
found = {{}}
for name in {names!r}:
    importlib.import_module(name)
    for heavy in {HEAVY!r}:
        if heavy in sys.modules:
            found.setdefault(heavy, name)
print(json.dumps(found))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {}


def test_every_test_says_what_is_true() -> None:
    """Each test function has a docstring."""
    silent = [
        f"{name}.{node.name}"
        for name, path in modules_of("tests").items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and not ast.get_docstring(node)
    ]
    assert silent == []


def test_no_file_names_a_path_of_somebody_s_machine() -> None:
    """Nothing in the project depends on where a checkout or a home folder lies."""
    rooms = [*MAY_IMPORT, "tests", "benchmarks", "docs", "requirements", ".ci"]
    # In a worktree of git's, .git is a file, and git's own.
    paths = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]
    paths += [path for room in rooms for path in (ROOT / room).rglob("*") if path.is_file()]
    personal = re.compile(rb"/(?:work|root|Users|home/[\w.-]+)/|" + re.escape(bytes(ROOT)) + rb"\b")
    guilty = [
        str(path.relative_to(ROOT))
        for path in paths
        if "__pycache__" not in path.parts and path.resolve() != Path(__file__).resolve()
        if personal.search(path.read_bytes())
    ]
    assert guilty == []


def test_pins_are_plain_and_within_the_declared_ranges() -> None:
    """Every dependency is pinned to one public release that pyproject.toml allows, without build tags or addresses."""
    lines = [line for path in (ROOT / "requirements").glob("*.txt") for line in path.read_text().splitlines()]
    pins = {}
    for line in lines:
        if not line.startswith(("#", "-r ")):
            assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*", line)
            name, _, version = line.partition("==")
            pins[canonicalize_name(name)] = version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for requirement in map(Requirement, project["dependencies"] + extras["test"] + extras["lint"] + extras["ray"]):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement
