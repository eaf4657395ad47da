"""One service with the embedded model for all tests that do not hurt it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from target.embedded import embedded_model_dir
from target.errors import CheckpointError
from tests.e2e.server import Server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A service with a small pool, whose engine proves its invariants after every step."""
    try:
        embedded_model_dir()
    except CheckpointError:
        pytest.skip("the embedded model is not fetched; `forerun fetch` fetches it")
    flags = ["--num-blocks", "128", "--check-invariants", "--max-model-len", "1024"]
    with Server(tmp_path_factory.mktemp("server") / "log", *flags) as running:
        yield running
