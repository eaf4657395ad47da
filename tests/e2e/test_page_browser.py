"""The page in a real browser: on the scripted engine where speed does not matter, and on the embedded model."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from selenium.webdriver import ActionChains, Chrome, Keys
from selenium.webdriver.common.by import By

from service.experiments.manager import Experiments
from service.experiments.validation import parse_definition
from tests.e2e.page import Page, text_of
from tests.e2e.scripted_service import ScriptedService
from tests.e2e.server import Server
from tests.service.experiments.test_manager import drive
from tests.service.experiments.traffic import Law, body

MARKUP = "<img src=x onerror=alert(1)><script>document.title='gone'</script>"
ENDLESS = "Write the numbers from 1 to 500, one number a line, and nothing else."
"""Greedy, the answer goes on for more than 900 tokens."""
COPY = "Repeat this list exactly: amber, basalt, cedar, delta, ember, fjord, granite, harbor, indigo, juniper."


@pytest.fixture
def real(browser: Chrome, server: Server) -> Iterator[Page]:
    """The page of the service with the embedded model."""
    shown = Page(browser, server.url)
    yield shown
    assert shown.complaints() == []


def answer_of(url: str, request: dict[str, Any]) -> str:
    """What the REST route says."""
    data = json.dumps(request).encode()
    with urllib.request.urlopen(f"{url}/v1/chat/completions", data, timeout=60) as response:  # noqa: S310 - our own
        return str(json.load(response)["choices"][0]["message"]["content"])


def test_an_answer_streams_in_colours(page: Page) -> None:
    """Text, colours and counters are those of the answer; each token tells of itself, by pointer and by keyboard."""
    question = "Größe 東京 👩‍👩‍👧 🎉 fox"
    page.open()
    page.set_number("Seed", "5")
    page.show_tokens()
    page.ask(question)
    (answer,) = page.answers()
    request = {"messages": [{"role": "user", "content": question}], "seed": 5, "max_tokens": 512}
    assert text_of(answer) == answer_of(page.url, request)
    assert set(page.sources(answer)) == {"ngram", "target"}
    guess, own = (answer.find_element(By.CSS_SELECTOR, f"[data-source={source}]") for source in ("ngram", "target"))
    assert guess.value_of_css_property("background-color") != own.value_of_css_property("background-color")
    note = answer.find_element(By.CSS_SELECTOR, ".answer-note").text
    assert "draft tokens accepted (100 %)" in note
    assert "seed 5" in note
    counters = {one.get_attribute("data-counter"): one.text for one in page.find("[data-counter]")}
    assert counters.keys() == {"speed", "acceptance", "ttft", "saved"}
    assert counters["acceptance"] == "3.00"
    assert counters["ttft"].endswith("ms")
    ActionChains(page.browser).move_to_element(guess).perform()
    assert "position 1" in page.text(".tip")
    assert "drafted by ngram, place 1 of its draft" in page.text(".tip")
    assert "logprob −0.500 (60.7 %)" in page.text(".tip")
    ActionChains(page.browser).move_to_element(page.one(".wordmark")).perform()
    assert not page.one(".tip").is_displayed()


def test_what_people_and_models_write_is_only_text(page: Page) -> None:
    """Markup in a question, an answer, or an experiment is shown letter by letter and makes no element."""
    page.open()
    page.ask(MARKUP)
    (answer,) = page.answers()
    assert page.text(".question") == MARKUP
    assert text_of(answer)
    assert page.find("main img, main script") == []
    assert page.browser.title == "forerun · playground"


def test_two_race_to_the_same_text(page: Page) -> None:
    """Side by side, at once or in turn, a profile and plain decoding give one text, and the page says so."""
    page.open()
    page.choose(".settings select", "profile:fast")
    page.one("#compare").click()
    for order in ("together", "in turn"):
        page.choose(".settings > div:nth-of-type(3) select:last-of-type", order)
        page.ask("The quick brown fox")
        left, right = page.answers()
        assert text_of(left) == text_of(right)
        assert set(page.sources(left)) == {"ngram", "target"}
        assert set(page.sources(right)) == {"target"}
        page.until(lambda: page.text(".turn:last-child .verdict").startswith("Same text, all"))


def test_a_method_takes_parameters(page: Page) -> None:
    """The form has the method's own parameters, sends them, and shows what the service says is wrong with them."""
    page.open()
    page.choose(".settings select", "custom")
    labels = [one.text for one in page.find(".parameters label")]
    assert labels == ["method", "num speculative tokens", "min n", "max n"]
    *_, shortest, longest = page.find(".parameters input")
    shortest.send_keys("5")
    longest.send_keys("2")
    page.ask("hello")
    (answer,) = page.answers("failed")
    assert "min_n is 5, above max_n, 2" in answer.text
    shortest.clear()
    page.ask("hello")
    page.answers("finished")


def test_the_engine_at_work_is_shown(page: Page) -> None:
    """Blocks by state, batch, queue, acceptance by position, steps and skipped drafts are those of the engine."""
    page.open()
    page.ask("hello there")
    page.answers()
    page.open("engine")
    page.until(lambda: page.find(".tile"))
    titles = [one.text for one in page.find(".tile h3")]
    assert titles == [
        *("Batch", "Queue", "Output", "Step time", "KV blocks", "Prefix hit rate", "Time saved", "Exactness audit"),
        *("Acceptance by position", "Step time distribution", "Steps without a draft", "Proposers"),
    ]
    assert "free 999" in page.text("[aria-label='KV blocks']")
    assert "50 % of 2" in page.text("[aria-label='Acceptance by position']")
    assert "disabled" in page.text("[aria-label='Steps without a draft']")
    assert "engine-0" in page.text("[aria-label=Engines] tbody")
    assert "(no tenant)" in page.text("[aria-label=Tenants] tbody")
    newest = page.text("[aria-label='Last requests'] tbody tr:first-child")
    assert "ws-" in newest
    assert "auto" in newest
    assert max(one.size["height"] for one in page.find(".tiles:not(.wide) .tile")) < 170, "no tile is mostly empty"
    page.tab_to("a[href=metrics]")
    script = "return performance.getEntriesByName(`${location.origin}/v1/engine`).length"
    looks = page.browser.execute_script(script)
    page.until(lambda: page.browser.execute_script(script) > looks + 1)
    assert page.browser.switch_to.active_element.get_attribute("href") == f"{page.url}/metrics"


def test_an_experiment_s_life_by_keyboard(page: Page, scripted: ScriptedService) -> None:
    """Without a pointer: created after a mistake that is pointed at, seen in the list, stopped, deleted."""
    page.open("experiments")
    page.tab_to("#experiments aside button")
    page.keys(Keys.ENTER)
    page.until(lambda: page.find("dialog[open]"))
    assert len([one for one in page.find("dialog .field") if one.is_displayed()]) == 5
    page.keys("two words")
    page.tab_to("dialog summary")
    page.keys(Keys.SPACE)
    page.tab_to("dialog [name=hypothesis]")
    page.keys(MARKUP)
    page.tab_to("dialog button.primary")
    page.keys(Keys.ENTER)
    page.until(lambda: "name is 'two words'" in page.text("dialog .problem"))
    focused = page.browser.switch_to.active_element
    assert (focused.get_attribute("name"), focused.get_attribute("aria-invalid")) == ("name", "true")
    page.press(Keys.CONTROL, "a")
    page.keys("first", Keys.ENTER)
    page.until(lambda: page.find(".experiment h1") and page.text(".experiment h1") == "first")
    page.until(lambda: "Collecting: 0 of at least 200 requests" in page.text(".conclusion"))
    assert page.text(".hypothesis") == f"“{MARKUP}”"
    assert page.find("main img, main script") == []
    assert page.text(".experiment-list").split() == ["first", "running"]
    experiment = scripted.front.experiments.book.experiments["first"]
    assert [arm.name for arm in experiment.definition.arms] == ["none", "ngram"]
    page.tab_to(".actions button:nth-child(2)")
    page.keys(Keys.ENTER)
    page.tab_to("dialog button.primary")
    page.keys(Keys.ENTER)
    page.until(lambda: page.text(".experiment .heading .chip") == "stopped")
    page.tab_to(".actions button:last-child")
    page.keys(Keys.ENTER)
    page.tab_to("dialog button.primary")
    page.keys(Keys.ENTER)
    page.until(lambda: page.find("#experiments .greeting"))
    complaints = page.complaints()
    assert all("400 (Bad Request)" in one or "404 (Not Found)" in one for one in complaints), complaints


async def look(experiments: Experiments, law: Law, first: int) -> None:
    """Forty requests, and what happens every two seconds."""
    drive(experiments, law, 40, first=first)
    await experiments._share()
    await experiments._evaluate()


def read_look(page: Page) -> int:
    """After how many requests the interval is what the page reads out."""
    reading = page.text(".plot .reading")
    found = re.fullmatch(r"After ([\d,]+) requests: [+−][\d.]+ %, interval [+−][\d.]+ % to [+−][\d.]+ %", reading)
    assert found is not None, reading
    return int(found[1].replace(",", ""))


def test_an_experiment_is_watched_and_promoted(page: Page, scripted: ScriptedService) -> None:
    """Verdict, interval over time, arms and guardrails are shown as they come; the winner becomes the default."""
    experiments = scripted.front.experiments
    definition = body(name="watched", guardrails=[{"metric": "ttft", "max_worsening": 2.0}], max_samples=100_000)
    scripted.run(experiments.create(parse_definition(msgspec.json.encode(definition))))
    page.open("experiments/watched")
    page.until(lambda: page.text(".conclusion").startswith("Collecting"))
    law = Law(1, (1.0, 0.7))
    for first in range(0, 1600, 40):
        scripted.run(look(experiments, law, first))
    page.until(lambda: "; safe to promote" in page.text(".conclusion"))
    assert page.find("svg polygon.band")
    newest = scripted.run(experiments.trace("watched")).points[-1].num_samples
    page.until(lambda: read_look(page) == newest)
    page.one("svg[aria-label^='How much faster ngram-8 is than plain']").send_keys(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    assert read_look(page) == newest - 40
    assert {"plain", "ngram-8"} <= set(page.text("[aria-label=Arms] tbody").split())
    assert "is at most 200 % worse than plain's holds" in page.text("[aria-label=Guardrails]")
    assert page.nameless() == []
    page.button("Promote ngram-8").click()
    page.one("dialog button.primary").click()
    page.until(lambda: page.text(".experiment .heading .chip") == "promoted")
    assert experiments.book.default == "watched.ngram-8"


def test_an_address_that_names_no_experiment_says_so(page: Page) -> None:
    """A link to an experiment that is gone shows the service's words, and the others can still be chosen."""
    page.open("experiments/gone")
    page.until(lambda: "'gone'" in page.text("#experiments .problem"))
    assert any("404" in one for one in page.complaints())


def test_a_service_with_keys_asks_for_one(browser: Chrome, tmp_path: Path) -> None:
    """The page asks until the key is right; then it chats, and says what is for operators alone."""
    with ScriptedService(tmp_path, keys="somebody schlüssel/1\n") as service:
        page = Page(browser, service.url)
        browser.get(service.url)
        for key in ("wrong", "schlüssel/1"):
            page.until(lambda: page.find(".key-form input"))
            page.one(".key-form input").send_keys(key, Keys.ENTER)
            page.until(lambda: page.find("body[data-ready]") or page.find(".key-form input"))
        page.until(lambda: page.find("body[data-ready]"))
        page.ask("hello fox")
        (answer,) = page.answers()
        assert text_of(answer)
        page.open("engine")
        page.until(lambda: "is for operators" in page.text("#engine"))
        assert all("401" in one or "403" in one for one in page.complaints())


def test_who_listens_is_told_everything(page: Page) -> None:
    """Every control, picture and landmark of each view has a name, in dialogs too, and the end of an answer is said."""
    page.open()
    page.one("#compare").click()
    page.choose(".settings select", "custom")
    page.ask("The quick brown fox")
    page.answers()
    page.until(lambda: page.announced().startswith("Same text, all"))
    assert page.nameless() == []
    page.one("#compare").click()
    page.ask("The quick brown fox")
    page.answers()
    page.until(lambda: page.announced().startswith("Answer finished, "))
    page.open("engine")
    page.until(lambda: page.find(".tile"))
    assert page.nameless() == []
    page.open("experiments")
    page.button("New experiment").click()
    page.until(lambda: page.find("dialog[open]"))
    assert page.nameless() == []


def test_light_and_dark_follow_the_system(page: Page) -> None:
    """The ground turns dark and the text light when the system says so."""
    page.open()
    seen = {}
    for scheme in ("light", "dark"):
        page.set_scheme(scheme)
        html = page.one("html")
        seen[scheme] = (html.value_of_css_property("background-color"), html.value_of_css_property("color"))
    page.set_scheme("light")
    assert len({*seen["light"], *seen["dark"]}) == 4


def test_nothing_comes_from_elsewhere(page: Page) -> None:
    """Every resource that the page loads is of the service itself."""
    page.open()
    script = "return performance.getEntriesByType('resource').map((one) => one.name)"
    loaded = page.browser.execute_script(script)
    assert len(loaded) > 5
    assert all(name.startswith(page.url) for name in loaded)


def test_the_model_answers_by_keyboard_alone(real: Page) -> None:
    """Without a pointer two configs are compared on the embedded model: one text, coloured, each token readable."""
    real.open()
    real.tab_to(".settings select")
    real.keys("with parameters")
    real.tab_to(".parameters input")
    real.keys("4")  # a fixed length: an adaptive one may find plain decoding quicker, on a busy machine
    real.tab_to("#compare")
    real.keys(Keys.SPACE)
    real.tab_to(".pairs .field:first-child input")
    real.press(Keys.CONTROL, "a")
    real.keys("0")
    real.tab_to("[role=switch]")
    real.keys(Keys.SPACE)
    real.tab_to("[aria-label=Message]")
    real.keys(COPY, Keys.ENTER)
    left, right = real.answers()
    assert text_of(left) == text_of(right)
    assert set(real.sources(left)) > {"target"}
    assert set(real.sources(right)) == {"target"}
    real.until(lambda: real.text(".verdict").startswith("Same text, all"))
    real.tab_to(".answer .token")
    real.keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert "from the target model" in real.text(".tip")
    assert "position 3" in real.text(".tip")
    real.keys(Keys.ESCAPE)
    assert not real.one(".tip").is_displayed()


def test_a_long_answer_can_be_stopped(real: Page, server: Server) -> None:
    """Escape ends the answer where it is: it says so, keeps its text, and the engine frees what it held."""
    real.open()
    real.choose(".settings select", "none")
    real.set_number("Temperature", "0")
    real.set_number("Max tokens", "900")
    real.ask(ENDLESS)
    real.until(lambda: real.find(".token"))
    real.keys(Keys.ESCAPE)
    (answer,) = real.answers("cancelled")
    assert text_of(answer)
    assert "cancelled" in answer.find_element(By.CSS_SELECTOR, ".answer-note").text
    server.wait_until_idle()
