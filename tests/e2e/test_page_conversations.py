"""Conversations on the page: Markdown, what can be done with an answer, what the browser keeps, and small screens."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from selenium.webdriver import ActionChains, Chrome, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from service.experiments.validation import parse_definition
from tests.e2e.page import Page, text_of
from tests.e2e.scripted_service import ScriptedService
from tests.service.experiments.traffic import body

MARKDOWN = """
# Title

**bold** `code` <b>raw</b> [good](https://b.example/) [bad](javascript:window.ran=1)

```python
def f(): return 'x'
```

| a | b |
|---|--:|
| 1 | 2 |

- end
"""
PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}


@pytest.fixture(autouse=True)
def nothing_kept(page: Page) -> None:
    """Each test begins with a browser that has kept nothing."""
    page.open()
    page.browser.execute_script("localStorage.clear()")
    page.open()
    page.set_number("Seed", "0")


@pytest.fixture
def phone(page: Page) -> Iterator[Page]:
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    yield page
    page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def say(page: Page, question: str, *states: str) -> WebElement:
    """Ask, and wait for the answer."""
    number = len(page.find(".turn"))
    page.one("[aria-label=Message]").send_keys(question.replace("\n", Keys.SHIFT + Keys.ENTER + Keys.NULL), Keys.ENTER)
    page.until(partial(shows_turns, page, number + 1))
    (answer,) = page.answers(*states)
    return answer


def press(answer: WebElement, name: str) -> None:
    """Press the answer's button with this text."""
    answer.find_element(By.XPATH, f".//button[normalize-space()='{name}']").click()


def clipboard(page: Page) -> str:
    """What was copied last."""
    script = "const done = arguments[0]; navigator.clipboard.readText().then(done, (error) => done(String(error)))"
    return str(page.browser.execute_async_script(script))


def questions(page: Page) -> list[str]:
    return [one.text for one in page.find(".question")]


def shows_turns(page: Page, number: int) -> bool:
    return len(page.find(".turn")) == number


def in_view(page: Page, selector: str) -> bool:
    box = page.one(selector).rect
    height, width = page.browser.execute_script("return [innerHeight, innerWidth]")
    return bool(box["y"] >= 0 and box["y"] + box["height"] <= height and box["x"] + box["width"] <= width)


def test_markdown_is_shown_as_elements(page: Page) -> None:
    """Headings, emphasis, code in colour, tables, lists and links appear; raw HTML and scripts' addresses do not."""
    answer = say(page, MARKDOWN)
    shown = page.rendered(answer)

    def parts(selector: str) -> list[str]:
        return [one.text for one in shown.find_elements(By.CSS_SELECTOR, selector)]

    page.until(lambda: parts("td"))
    assert parts("h3") == ["Title"]
    assert parts("strong") == ["bold"]
    assert parts("p code") == ["code"]
    assert parts("pre") == ["def f(): return 'x'"]
    assert parts(".code-bar span") == ["python"]
    assert parts("td") == ["1", "2"]
    assert parts("li")
    assert parts("b") == []
    assert "<b>raw</b>" in shown.text
    (link,) = shown.find_elements(By.CSS_SELECTOR, "a")
    assert (link.text, link.get_attribute("href")) == ("good", "https://b.example/")
    assert link.get_attribute("rel") == "noopener noreferrer nofollow"
    keyword, name = (shown.find_element(By.CSS_SELECTOR, f"pre .{kind}") for kind in ("k", "nf"))
    assert keyword.value_of_css_property("color") != name.value_of_css_property("color")
    assert page.nameless() == []


def test_the_switch_shows_tokens_and_is_remembered(page: Page) -> None:
    """An answer is read as text until the switch is pressed; pressed by keyboard, it stays so after a reload."""
    answer = say(page, "hello **fox**")
    page.rendered(answer)
    assert not answer.find_element(By.CSS_SELECTOR, ".tokens").is_displayed()
    page.tab_to("[role=switch]")
    page.keys(Keys.SPACE)
    assert answer.find_element(By.CSS_SELECTOR, ".tokens").is_displayed()
    assert not answer.find_element(By.CSS_SELECTOR, ".markdown").is_displayed()
    assert page.one(".legend").is_displayed()
    page.open()
    assert page.one("[role=switch]").get_attribute("aria-checked") == "true"
    page.show_tokens(on=False)


def test_conversations_are_kept_listed_and_deleted(page: Page) -> None:
    """A reload loses nothing: the list opens each conversation with its answers, and it goes on with its history."""
    first = text_of(say(page, "about a fox"))
    say(page, "and **more**")
    page.button("New conversation").click()
    say(page, "something else")
    page.open()
    assert page.find(".turn") == []
    page.one(".past summary").click()
    assert [one.text for one in page.find(".past li button:first-child")] == ["something else", "about a fox"]
    page.button("about a fox").click()
    assert questions(page) == ["about a fox", "and **more**"]
    assert text_of(page.find(".answer")[0]) == first
    page.until(lambda: page.find(".turn:last-of-type .markdown strong"))
    assert [one.get_attribute("data-state") for one in page.find(".answer")] == ["finished", "finished"]
    assert first in text_of(say(page, "and again")), "the history is sent along"
    assert page.nameless() == []
    page.one(".past li:last-child .remove").click()
    assert [one.text for one in page.find(".past li button:first-child")] == ["about a fox"]
    page.button("Delete all conversations").click()
    assert not page.one(".past").is_displayed()
    assert page.find(".turn") == []
    page.open()
    assert not page.one(".past").is_displayed()


def test_storage_that_is_full_or_spoiled_does_no_harm(page: Page) -> None:
    """With nonsense in the storage, or no room in it, the page still chats."""
    for spoil in ("'{'", "'7'", "'[1, null, {}]'"):
        page.browser.execute_script(f"localStorage.setItem('forerun-conversations', {spoil})")
        page.open()
        say(page, "hello fox")
    page.browser.execute_script("localStorage.clear(); localStorage.setItem('x', 'x'.repeat(5 * 1024 * 1024 - 10))")
    page.open()
    say(page, "hello fox")
    page.browser.execute_script("localStorage.clear()")


def test_an_answer_is_given_again_and_a_question_changed(page: Page) -> None:
    """Regenerate replaces an answer and what follows; Edit sends a changed question instead; Delete drops a turn."""
    for question in ("one", "two", "three"):
        say(page, question)
    press(page.find(".answer")[1], "Regenerate")
    page.until(lambda: questions(page) == ["one", "two"])
    page.answers()
    page.find(".turn")[0].find_element(By.XPATH, ".//button[.='Edit']").click()
    assert page.one("[aria-label=Message]").get_attribute("value") == "one"
    assert page.one(".editing").is_displayed()
    page.keys(Keys.ESCAPE)
    assert not page.one(".editing").is_displayed()
    page.find(".turn")[1].find_element(By.XPATH, ".//button[.='Edit']").click()
    page.keys(" changed", Keys.ENTER)
    page.until(lambda: questions(page) == ["one", "two changed"])
    page.answers()
    page.find(".turn")[0].find_element(By.XPATH, ".//button[.='Delete']").click()
    assert questions(page) == ["two changed"]
    page.open()
    page.one(".past summary").click()
    page.button("two changed").click()
    assert questions(page) == ["two changed"]


def test_a_request_can_be_taken_along(page: Page, tmp_path: Path) -> None:
    """Text, curl and Python are copied; both programs, run as they are, give the answer of the page."""
    page.browser.execute_cdp_cmd(
        "Browser.grantPermissions", {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    )
    page.set_number("Top k", "5")
    page.set_number("Stop strings", "zzz")
    answer = say(page, 'it\'s a "fox" \\ 東京\nsecond $HOME line')
    text = text_of(answer)
    press(answer, "Copy")
    page.until(lambda: clipboard(page) == text)
    press(answer, "Copy as curl")
    page.until(lambda: clipboard(page).startswith("curl"))
    done = subprocess.run(["bash", "-c", clipboard(page)], capture_output=True, text=True, timeout=60, check=True)  # noqa: S607 - the shell that users have
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == text
    press(answer, "Copy as Python")
    page.until(lambda: clipboard(page).startswith("from openai"))
    program = tmp_path / "program.py"
    program.write_text(clipboard(page))
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"{text}\n"


def test_a_conversation_is_exported(page: Page, tmp_path: Path) -> None:
    """Markdown and JSON files have the system prompt, the questions and the answers."""
    page.browser.execute_cdp_cmd(
        "Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path), "eventsEnabled": False}
    )
    page.one(".system summary").click()
    page.one("#system").send_keys("Be brief.")
    answer = text_of(say(page, "about a fox"))
    assert "Be brief." in answer
    for name in ("Export as Markdown", "Export as JSON"):
        page.button(name).click()
    page.until(lambda: len([one for one in tmp_path.iterdir() if one.suffix in {".md", ".json"}]) == 2)
    (markdown,), (exported,) = (list(tmp_path.glob(f"*.{ending}")) for ending in ("md", "json"))
    assert markdown.read_text() == (
        f"# about a fox\n\n## System\n\nBe brief.\n\n## User\n\nabout a fox\n\n## Assistant\n\n{answer}\n"
    )
    kept = json.loads(exported.read_text())
    assert (kept["system"], kept["turns"][0]["answers"][0]["text"]) == ("Be brief.", answer)


def test_the_end_of_an_answer_is_told_apart(page: Page) -> None:
    """The token limit and a stop string end an answer, and the page says which; the context meter counts its tokens."""
    answer = say(page, "hello there fox")
    assert answer.find_element(By.CSS_SELECTOR, ".state").text == "finished"
    whole = text_of(answer)
    page.set_number("Stop strings", "fox")
    answer = say(page, "hello there fox", "finished")
    assert text_of(answer) in whole + text_of(answer)
    assert "fox" not in text_of(answer)
    page.one("[aria-label=Settings] details textarea").clear()
    page.set_number("Max tokens", "3")
    answer = say(page, "hello there fox", "limit")
    assert answer.find_element(By.CSS_SELECTOR, ".state").text == "stopped at the token limit"
    page.until(lambda: "stopped at the token limit, 3 tokens" in page.announced())
    used = int(page.one(".context meter").get_attribute("value") or 0)
    assert used > 3
    assert page.text(".context") == f"{used} of 2,048 tokens"


def test_a_token_tells_its_alternatives(page: Page) -> None:
    """Asked for in the settings, the likeliest other tokens stand in a token's card with their probabilities."""
    page.one("#alternatives").click()
    page.show_tokens()
    answer = say(page, "hello fox")
    ActionChains(page.browser).move_to_element(answer.find_element(By.CSS_SELECTOR, ".token")).perform()
    rows = [one.text.split() for one in page.find(".tip .alternatives li")]
    assert len(rows) == 5
    assert rows[0][-2:] == ["60.7", "%"]
    assert page.find(".tip .alternatives .chosen")
    page.show_tokens(on=False)


def test_an_answer_says_which_arm_or_config_gave_it(page: Page, scripted: ScriptedService) -> None:
    """What the service chose is named: its default config, or the arm of a running experiment."""
    answer = say(page, "hello fox")
    assert answer.find_element(By.CSS_SELECTOR, ".ran").text == "auto"
    experiments = scripted.front.experiments
    scripted.run(experiments.create(parse_definition(msgspec.json.encode(body(name="running")))))
    answer = say(page, "hello fox")
    assert answer.find_element(By.CSS_SELECTOR, ".ran").text.startswith("experiment running, arm ")
    scripted.run(experiments.stop("running"))


def test_compared_answers_stand_in_line(page: Page) -> None:
    """The numbers of both sides are at one height, whatever their titles take; a table has both runs."""
    page.choose(".settings select", "custom")
    page.one(".parameters input").send_keys("4")
    page.one("#compare").click()
    page.ask("The quick brown fox")
    page.answers()
    for part in (".counters", ".answer-text", ".answer-note", ".answer-actions"):
        left, right = (one.rect["y"] for one in page.find(f".answers.race {part}"))
        assert left == right, part
    table: list[list[str]] = page.until(
        lambda: [
            [cell.text for cell in row.find_elements(By.CSS_SELECTOR, "th, td")] for row in page.find(".compared tr")
        ]
    )
    assert table[0] == ["Measure", "A: ngram · num_speculative_tokens 4", "B: none"]
    rows = {name: values for name, *values in table[1:]}
    assert rows["Output tokens"][0] == rows["Output tokens"][1] != "–"
    assert rows["Mean acceptance length"] == ["3.00", "–"]


def has_code(answer: WebElement) -> bool:
    return bool(answer.find_elements(By.CSS_SELECTOR, ".markdown pre"))


def test_wide_code_scrolls_by_itself(page: Page) -> None:
    """A long line of code makes its block scroll, neither the conversation nor the page, alone and side by side."""
    for number in (1, 2):
        page.ask(Keys.SHIFT + Keys.ENTER * 2 + "```python" + Keys.ENTER + "x" * 300 + Keys.ENTER + "```" + Keys.NULL)
        page.until(partial(shows_turns, page, number))
        for answer in page.answers():
            page.until(partial(has_code, answer))
        script = "const one = document.querySelector(arguments[0]); return one.scrollWidth > one.clientWidth"
        assert page.browser.execute_script(script, ".turn:last-of-type pre")
        assert not page.browser.execute_script(script, ".log")
        page.one("#compare").click()


def test_an_example_is_deterministic(page: Page) -> None:
    """A sample is asked at temperature 0."""
    page.one(".example").click()
    page.answers()
    assert page.one(".pairs .field:first-child input").get_attribute("value") == "0"


@pytest.mark.parametrize("view", ["text", "tokens"])
def test_a_phone_has_the_message_box_in_view(phone: Page, view: str) -> None:
    """On a small screen message box and Send are in view before and after answers; settings are a press away."""
    phone.open()
    phone.show_tokens(on=view == "tokens")
    for _ in range(2):
        assert in_view(phone, "[aria-label=Message]")
        assert in_view(phone, "button[type=submit]")
        say(phone, "hello **there** " * 20)
    assert in_view(phone, "[aria-label=Message]")
    assert phone.browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    assert not phone.one(".settings").is_displayed()
    phone.button("Settings").click()
    assert phone.one(".settings").is_displayed()
    assert not phone.one(".log").is_displayed()
    assert phone.nameless() == []
    phone.button("Back to the conversation").click()
    assert in_view(phone, "[aria-label=Message]")
    phone.show_tokens(on=False)


def test_the_page_has_one_heading_of_the_first_level(page: Page, browser: Chrome) -> None:
    """Every view has one h1 in sight of a screen reader, with a conversation and without."""

    def headings() -> list[Any]:
        return [one for one in page.find("h1") if browser.execute_script("return arguments[0].checkVisibility()", one)]

    assert len(headings()) == 1
    say(page, "hello fox")
    assert len(headings()) == 1
    for view in ("experiments", "engine"):
        page.open(view)
        page.until(lambda: len(headings()) == 1)
