"""What the project's own pages say of themselves: every link leads somewhere, and examples can be run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.clients.__main__ import CLIENTS, Client
from tests.clients.examples import examples

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def anchors(page: Path) -> set[str]:
    """Where a link into a page can lead, as repository hosts name it."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_what_there_is(page: Path) -> None:
    """Every relative link and picture names a file of the project, by its path from the page, and a title in it."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        found = page.parent / name if name else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_examples_are_python(page: Path) -> None:
    """Every block of Python compiles as it is printed."""
    for example in examples(page):
        if example.language == "python":
            compile(example.code, f"{page.name}, {example.title}", "exec")


def test_the_proposer_runs_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """The blocks of docs/proposers.md, run one after another, print the line that the page says they print."""
    page = ROOT / "docs/proposers.md"
    names: dict[str, object] = {}
    for example in examples(page):
        if example.language == "python":
            exec(compile(example.code, page.name, "exec"), names)  # noqa: S102 - the page's own code is what is tested
    printed = capsys.readouterr().out.strip()
    assert printed
    assert f"It prints `{printed}`" in page.read_text()


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_each_client_that_is_run_has_its_example_and_its_version(client: Client) -> None:
    """docs/clients.md has one example of each client of `make clients`, and names its installed version."""
    assert client.example().code
    page = (ROOT / "docs/clients.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith(f"| [{client.title}]"))
    assert client.version in row


@pytest.mark.parametrize("path", sorted((ROOT / "requirements").glob("clients-*.txt")), ids=lambda path: path.name)
def test_versions_of_clients_are_exact(path: Path) -> None:
    """Every line pins one version, and torch is named plainly, so that an index with CPU builds answers with one."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.\-]+==[\w.]+", line) for line in lines)
    assert path.stem.removeprefix("clients-") in {client.environment for client in CLIENTS}
