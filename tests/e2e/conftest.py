"""What tests share: a service with the embedded model, and a browser on the page of the scripted engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from selenium.webdriver import Chrome

from target.embedded import embedded_model_dir
from target.errors import CheckpointError
from tests.browser import open_browser
from tests.e2e.page import Page
from tests.e2e.scripted_service import ScriptedService
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


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    running = open_browser(tmp_path_factory.mktemp("browser"))
    yield running
    running.quit()


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedService]:
    with ScriptedService(tmp_path_factory.mktemp("model")) as running:
        yield running


@pytest.fixture
def page(browser: Chrome, scripted: ScriptedService) -> Iterator[Page]:
    """The page of the scripted service; nothing that a test does may make the browser complain."""
    shown = Page(browser, scripted.url)
    yield shown
    assert shown.complaints() == []
