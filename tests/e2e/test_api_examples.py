"""The examples of README, docs/clients.md and docs/api.md, run as printed against a service of their own, in order."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.app import create_app
from service.settings import Settings
from target.embedded import embedded_model_dir
from target.errors import CheckpointError
from tests.clients.examples import Example, examples
from tests.e2e.server import Server

ROOT = Path(__file__).resolve().parent.parent.parent
ADDRESS = "http://127.0.0.1:8000"
README = [example for example in examples(ROOT / "README.md") if ADDRESS in example.code]
CLIENTS = [example for example in examples(ROOT / "docs/clients.md") if example.title == "openai for Python"]
API = [example for example in examples(ROOT / "docs/api.md") if ADDRESS in example.code]
EXAMPLES = [*README, *CLIENTS, *API]
FAIL_ON_ERRORS = 'curl() { command curl --silent --show-error --fail-with-body "$@"; }\n'
WITHOUT_CURL = {"/v1/stream"}
"""A WebSocket."""
OF_THE_PAGE = ("/page/", "/docs")
"""What a browser asks for."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A service that these examples may change: they promote a config, and drain its engine at the end."""
    try:
        embedded_model_dir()
    except CheckpointError:
        pytest.skip("the embedded model is not fetched; `forerun fetch` fetches it")
    flags = ["--num-blocks", "128", "--max-model-len", "1024"]
    with Server(tmp_path_factory.mktemp("server") / "log", *flags) as running:
        yield running


@pytest.mark.parametrize(
    "example", EXAMPLES, ids=[f"{number}-{example.language}" for number, example in enumerate(EXAMPLES)]
)
def test_the_examples_work_as_printed(server: Server, example: Example) -> None:
    """Each block ends without an error: every curl gets a status below 400, and Python raises nothing.

    Other clients' examples in docs/clients.md need environments of their own: `make clients` runs them.
    """
    code = example.code.replace(ADDRESS, server.url)
    command = (
        [sys.executable, "-c", code] if example.language == "python" else ["/bin/sh", "-ec", FAIL_ON_ERRORS + code]
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.strip()


def test_every_route_has_a_curl() -> None:
    """Each route of the API, by method and path, is called by some curl of docs/api.md."""
    assert README
    assert CLIENTS
    called = set()
    for example in API:
        for command in re.split(r"^(?=curl )", example.code, flags=re.MULTILINE):
            if command.startswith("curl "):
                path = re.search(rf"{ADDRESS}(/[^\s'?]*)", command)
                assert path is not None, command
                method = re.search(r"-X (\w+)", command)
                called.add((method[1] if method else "POST" if "-d '" in command else "GET", path[1]))
    num_checked = 0
    for route in create_app(Settings()).router.routes():
        assert route.resource is not None
        name = route.resource.canonical
        if route.method == "HEAD" or name in WITHOUT_CURL or name == "/" or name.startswith(OF_THE_PAGE):
            continue
        pattern = route.resource.get_info().get("pattern") or re.compile(re.escape(name))
        assert any(method == route.method and pattern.fullmatch(path) for method, path in called), (route.method, name)
        num_checked += 1
    assert num_checked > 20
