from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from aiohttp.test_utils import TestServer

from service.experiments.commands import experiment_command, report_command
from service.experiments.handlers import EXPERIMENTS, setup
from service.experiments.manager import Experiments
from service.experiments.store import MemoryExperimentStore
from service.pool.settings import TenantSettings
from tests.service.conftest import StartService
from tests.service.experiments.test_handlers import application
from tests.service.experiments.test_manager import drive, look
from tests.service.experiments.traffic import Law, body

TOML = """
name = "lookup"
hypothesis = "Prompt lookup helps & does not hurt <anybody>"
allocation = "adaptive"

[[arms]]
name = "plain"
speculation = { method = "none" }

[[arms]]
name = "ngram-8"
speculation = { method = "ngram", num_speculative_tokens = 8 }
"""


@pytest.fixture
async def server() -> AsyncIterator[TestServer]:
    app = application()
    setup(app, Experiments(MemoryExperimentStore()))
    found = TestServer(app)
    await found.start_server()
    yield found
    await found.close()


async def run(server: TestServer, *words: str, status: int = 0) -> str:
    """What `forerun experiment …` prints; it runs beside the server as a user's would."""
    lines: list[str] = []
    arguments = ["--url", str(server.make_url("/")), *words]
    command = report_command if words[0] == "report-file" else experiment_command
    arguments = [word for word in arguments if word != "report-file"]
    assert await asyncio.to_thread(command, arguments, lines.append) == status, lines
    return "\n".join(lines)


async def test_an_experiment_from_a_terminal(server: TestServer, tmp_path: Path) -> None:
    """Created from TOML, listed, reported, watched to its end."""
    file = tmp_path / "experiment.toml"
    file.write_text(TOML)
    assert await run(server, "create", str(file)) == "lookup is running"
    assert "lookup" in await run(server, "list")
    experiments = server.app[EXPERIMENTS]
    drive(experiments, Law(1, (1.0, 0.7)), 1500)
    report = await run(server, "report", "lookup")
    assert "safe to promote" in report
    assert "ngram-8 against plain: +" in report
    assert "safe to promote" in await run(server, "watch", "lookup", "--seconds", "0.01")
    assert "stopped" in await run(server, "stop", "lookup")
    assert await run(server, "promote", "lookup") == "lookup is promoted"


async def test_a_draft_from_json(server: TestServer, tmp_path: Path) -> None:
    """JSON is as good as TOML; a draft is started by its name."""
    file = tmp_path / "experiment.json"
    file.write_text(json.dumps(body(filter={"header": {"name": "X-Team", "value": "a"}})))
    assert await run(server, "create", str(file), "--draft") == "lookup is draft"
    assert "(running, fixed)" in await run(server, "start", "lookup")


async def test_what_goes_wrong_is_said_in_the_service_s_words(server: TestServer, tmp_path: Path) -> None:
    """Unknown names, bad files and a service that is not there end with 1 and one line."""
    assert "no experiment is called 'x'" in await run(server, "report", "x", status=1)
    assert "No such file" in await run(server, "create", str(tmp_path / "none.json"), status=1)
    bad = tmp_path / "bad.toml"
    bad.write_text("= 3")
    assert "bad.toml" in await run(server, "create", str(bad), status=1)
    lines: list[str] = []
    assert await asyncio.to_thread(experiment_command, ["--url", "http://127.0.0.1:9", "list"], lines.append) == 1
    assert "no answer from http://127.0.0.1:9" in lines[0]


async def test_a_service_with_keys_is_told_one(start_service: StartService, tmp_path: Path) -> None:
    """Both commands send the operator's key, by flag or variable; without one they say how to give it."""
    (tmp_path / "keys").write_text("root s3cret operator\n")
    service = await start_service(tenants=TenantSettings(api_keys_file=str(tmp_path / "keys")))
    (tmp_path / "experiment.toml").write_text(TOML)
    lines: list[str] = []

    async def ask(command: Callable[..., int], *words: str, **environment: str) -> int:
        return await asyncio.to_thread(command, ["--url", service.url, *words], lines.append, environment)

    create = ("create", str(tmp_path / "experiment.toml"))
    assert await ask(experiment_command, *create) == 1
    assert "(--api-key, or FORERUN_API_KEY)" in lines[-1]
    assert await ask(experiment_command, "--api-key", "s3cret", *create) == 0
    out = ("lookup", "--html", str(tmp_path / "report.html"))
    assert await ask(report_command, *out, FORERUN_API_KEY="wrong") == 1
    assert await ask(report_command, *out, FORERUN_API_KEY="s3cret") == 0
    assert "lookup" in (tmp_path / "report.html").read_text()


class Page(HTMLParser):
    """Tags that were opened and not closed, and every attribute."""

    VOID = frozenset({"meta", "line", "polyline", "polygon"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


async def test_a_report_is_one_file_that_loads_and_runs_nothing(server: TestServer, tmp_path: Path) -> None:
    """The HTML is well-formed, has a plot of the difference, and neither scripts nor addresses; markup is inert."""
    file = tmp_path / "experiment.toml"
    file.write_text(TOML)
    await run(server, "create", str(file))
    experiments = server.app[EXPERIMENTS]
    for part in range(5):
        drive(experiments, Law(part, (1.0, 0.95)), 80, first=80 * part)
        await look(experiments)
    out = tmp_path / "report.html"
    await run(server, "report-file", "lookup", "--html", str(out))
    text = out.read_text()
    page = Page()
    page.feed(text)
    assert page.open == []
    assert "polygon" in page.tags
    assert not {"script", "link", "img", "iframe", "anybody"} & set(page.tags)
    assert not {"src", "href", "onload", "onclick"} & {name for name, _ in page.attributes}
    assert "http" not in text
    assert "&lt;anybody&gt;" in text
    assert "400" in text
    assert "No such file" in await run(server, "report-file", "lookup", "--html", str(tmp_path / "no" / "x"), status=1)
