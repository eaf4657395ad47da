"""Markup in what a model, a client or a name brings to the page: nothing of it runs, loads or becomes an element."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from selenium.webdriver import Chrome

from service.experiments.html_report import render
from service.experiments.validation import parse_definition
from service.settings import ServerSettings
from tests.browser import open_browser
from tests.e2e.page import Page, text_of
from tests.e2e.scripted_service import ScriptedService
from tests.service.experiments.traffic import body

SNIPPETS = (
    "<img src=x onerror=window.ran=1>",
    "<script>window.ran=1</script>",
    '"><svg onload=window.ran=1>',
    "'><iframe srcdoc='<script>parent.ran=1</script>'>",
    "</textarea></title></style><script src=page/ran.js></script>",
    '<a href="javascript:window.ran=1" autofocus onfocus=window.ran=1>x</a>',
    "<style>@import 'page/ran.css'</style><link rel=stylesheet href=page/ran.css>",
    "<form action=page/ran><button formaction=javascript:window.ran=1>x</button></form>",
    "<base href=http://evil.example/><meta http-equiv=refresh content=0;url=page/ran>",
    "{{constructor.constructor('window.ran=1')()}} ${window.ran=1} `${window.ran=1}`",
    "&lt;img src=x onerror=window.ran=1&gt; \\x3cscript\\x3ewindow.ran=1",
)
MARKUP = " ".join(SNIPPETS)
SHORT = '"><img src=x onerror=window.ran=1>'
"""Where a field takes no more."""

WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => window.violations.push(event.effectiveDirective));
"""
FOREIGN = (
    "main img, main script, iframe, main a[href^='javascript'], base[href*=evil], main form[action], link[href*=ran], "
    "[onerror], [onload], [onfocus]"
)
"""Elements and attributes that would come of the snippets."""
LOADED = {"x", "ran", "ran.js", "ran.css"}
"""Last parts of addresses that the snippets would load."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    running = open_browser(tmp_path_factory.mktemp("browser"))
    running.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": WATCH})
    running.set_script_timeout(30)
    yield running
    running.quit()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedService]:
    """A service whose very model is named by markup."""
    with ScriptedService(tmp_path_factory.mktemp("model"), server=ServerSettings(model_name=SHORT)) as running:
        yield running


@pytest.fixture
def page(browser: Chrome, service: ScriptedService) -> Iterator[Page]:
    """The page; whatever a test showed on it, nothing ran, nothing was loaded and the policy was never needed."""
    shown = Page(browser, service.url)
    shown.complaints()
    yield shown
    assert_nothing_ran(shown)
    assert shown.complaints() == []


def assert_nothing_ran(page: Page) -> None:
    """No text became a script, an element or a request, and none was even tried and refused."""
    assert page.browser.execute_script("return window.ran") is None
    assert page.browser.execute_script("return window.violations") == []
    assert page.find(FOREIGN) == []
    loaded = page.browser.execute_script("return performance.getEntriesByType('resource').map((one) => one.name)")
    assert [name for name in loaded if name.rpartition("/")[2] in LOADED] == []
    assert page.browser.execute_script("return document.baseURI").startswith(f"{page.url}/")


def create(url: str, definition: dict[str, Any]) -> None:
    """Create an experiment as any client would."""
    urllib.request.urlopen(f"{url}/v1/experiments", json.dumps(definition).encode(), timeout=60).close()  # noqa: S310


def test_an_answer_is_only_text(page: Page) -> None:
    """What the model writes is shown letter by letter, in one answer and side by side, and told of each token."""
    page.open()
    page.set_number("Seed", "0")
    page.set_number("Temperature", "0")
    page.set_number("Max tokens", "900")
    page.ask(MARKUP)
    (answer,) = page.answers()
    assert MARKUP in text_of(answer)
    assert page.text(".question") == MARKUP
    for token in answer.find_elements("css selector", ".token")[:200:20]:
        page.browser.execute_script("arguments[0].focus(); arguments[0].click()", token)
    assert_nothing_ran(page)
    assert SHORT in str(page.one("body").get_property("textContent")), "the model's name"
    page.open()
    page.set_number("Seed", "0")
    page.one("#compare").click()
    page.ask(SHORT)
    assert all(SHORT in text_of(each) for each in page.answers())


def test_texts_of_an_experiment_are_only_text(page: Page, service: ScriptedService, tmp_path: Path) -> None:
    """Hypothesis and filter of an experiment are shown as they are, on the page and in the report's file."""
    experiments = service.front.experiments
    changes: dict[str, Any] = {"filter": {"header": {"name": "X-Group", "value": SHORT}}}
    definition = body(name="marked", hypothesis=MARKUP, **changes)
    service.run(experiments.create(parse_definition(msgspec.json.encode(definition))))
    page.open("experiments/marked")
    page.until(lambda: page.find(".hypothesis"))
    assert page.text(".hypothesis") == f"“{MARKUP}”"
    assert_nothing_ran(page)
    page.open("experiments")
    page.until(lambda: page.find(".experiment-list"))
    assert_nothing_ran(page)
    file = tmp_path / "report.html"
    file.write_text(render(service.run(experiments.report("marked")), service.run(experiments.trace("marked"))))
    page.browser.get(file.as_uri())
    assert MARKUP in page.text("body")
    assert page.browser.execute_script("return window.ran") is None
    assert page.find("img, script, iframe, a, form, base, link") == []
    page.open()


def test_names_have_no_markup(page: Page, service: ScriptedService) -> None:
    """Names of experiments, arms, profiles and units with markup are refused, and the page shows that as text."""
    plain, lookup = body()["arms"]
    for changes in (
        {"name": SHORT},
        {"unit": f"header:{SHORT}"},
        {"arms": [{**plain, "name": SHORT}, lookup]},
        {"arms": [{"name": "a", "profile": SHORT}, lookup]},
    ):
        with pytest.raises(urllib.error.HTTPError) as caught:
            create(service.url, body(**changes))
        with caught.value as answer:
            assert answer.code in {400, 404}
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert answer.headers.get_content_type() == "application/json"
    page.open(f"experiments/{SHORT}")
    page.until(lambda: page.find("#experiments .problem"))
    assert_nothing_ran(page)
    assert all("404" in one or "400" in one for one in page.complaints())


def test_the_service_s_own_words_are_only_text(page: Page) -> None:
    """An error that repeats what was sent shows it as text."""
    page.open()
    page.choose(".settings select", "custom")
    page.one(".parameters input").send_keys("9" * 12)
    page.ask(MARKUP)
    page.answers("failed", "finished")


def test_the_policy_would_stop_what_slipped_through(page: Page) -> None:
    """Markup that did reach the document could not run: no inline handler or script, no eval, no foreign address."""
    page.open()
    run = page.browser.execute_script
    for script in (
        "document.createElement('div').innerHTML = '<b>x</b>'",
        "document.body.insertAdjacentHTML('beforeend', '<b>x</b>')",
        "document.createElement('script').text = 'window.ran = 1'",
        "document.createElement('iframe').srcdoc = '<b>x</b>'",
    ):
        assert run(f"try {{ {script}; return 'done' }} catch (error) {{ return error.name }}") == "TypeError", script
    for script in ("window.eval('window.ran = 1')", "new Function('window.ran = 1')()"):
        # What the driver itself runs may use eval; what runs later may not.
        later = f"try {{ {script}; done('done') }} catch (error) {{ done(error.name) }}"
        assert page.browser.execute_async_script(f"const done = arguments[0]; setTimeout(() => {{ {later} }})") == (
            "EvalError"
        )
    run(
        """
        const parsed = document.implementation.createHTMLDocument("");
        const image = document.createElement("img");
        try { image.setAttribute("onerror", "window.ran = 1") } catch { window.violations.push("trusted types") }
        image.src = "http://127.0.0.1:9/x.png";
        document.body.append(image);
        """
    )
    page.until(lambda: "img-src" in run("return window.violations"))
    fetched = "const done = arguments[0]; fetch('http://127.0.0.1:9/').then(() => done('sent'), () => done('refused'))"
    assert page.browser.execute_async_script(fetched) == "refused"
    assert "connect-src" in run("return window.violations")
    assert run("return window.ran") is None
    page.open()
    page.complaints()
