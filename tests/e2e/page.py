"""The page as a person sees it: what tests do in the browser, and what they read there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import ActionChains, Chrome, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

# fmt: off
NAMED_ROLES = frozenset({
    "alertdialog", "article", "button", "checkbox", "combobox", "dialog", "graphics-document", "image", "img",
    "link", "listbox", "navigation", "option", "radio", "region", "searchbox", "slider", "spinbutton", "switch", "tab",
    "table", "textbox",
})
# fmt: on
"""What says nothing to who listens unless it has a name."""
WAIT_SECONDS = 60.0
"""Generous: tests share the machine with others."""


class Page:
    """One browser on one service's page."""

    def __init__(self, browser: Chrome, url: str) -> None:
        self.browser = browser
        self.url = url

    def open(self, view: str = "playground") -> None:
        """Load the page anew, and wait until it is ready."""
        self.browser.get("about:blank")
        self.browser.get(f"{self.url}/#{view}")
        self.until(lambda: self.find("body[data-ready]"))

    def until(self, condition: Callable[[], Any]) -> Any:
        """What the condition gives once it gives something."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                if found := condition():
                    return found
            except StaleElementReferenceException:
                pass
            assert time.monotonic() < deadline, f"{condition} did not come true:\n{self.text('body')}"
            time.sleep(0.05)

    def find(self, selector: str) -> list[WebElement]:
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return self.one(selector).text

    def button(self, name: str) -> WebElement:
        """The visible button with this text."""
        found = self.browser.find_elements(By.XPATH, f"//button[normalize-space()='{name}']")
        return next(one for one in found if one.is_displayed())

    def keys(self, *keys: str) -> None:
        """Type, wherever the focus is."""
        ActionChains(self.browser).send_keys(*keys).perform()

    def press(self, modifier: str, key: str) -> None:
        """Press a key while a modifier is held."""
        ActionChains(self.browser).key_down(modifier).send_keys(key).key_up(modifier).perform()

    def tab_to(self, selector: str, *, most: int = 60) -> WebElement:
        """Press the tab key until the focus is on what the selector names."""
        for _ in range(most):
            focused = self.browser.switch_to.active_element
            if self.browser.execute_script("return arguments[0].matches(arguments[1])", focused, selector):
                return focused
            self.keys(Keys.TAB)
        raise AssertionError(f"{selector} cannot be reached with the tab key")

    def choose(self, selector: str, value: str) -> None:
        """Choose an option of a select by its value."""
        self.one(f"{selector} option[value='{value}']").click()

    def set_number(self, label: str, value: str) -> None:
        """Fill in a setting of the playground."""
        field = self.browser.find_element(By.XPATH, f"//label[.='{label}']/following-sibling::*")
        field.clear()
        field.send_keys(value)

    def show_tokens(self, *, on: bool = True) -> None:
        """Show answers token by token, or as text."""
        switch = self.one("[role=switch]")
        if (switch.get_attribute("aria-checked") == "true") != on:
            switch.click()

    def rendered(self, answer: WebElement) -> WebElement:
        """The answer as Markdown, once the service has rendered all of it."""
        found: list[WebElement] = self.until(lambda: answer.find_elements(By.CSS_SELECTOR, ".markdown:not(.plain)"))
        return found[0]

    def ask(self, question: str) -> None:
        self.one("[aria-label=Message]").send_keys(question, Keys.ENTER)

    def answers(self, *states: str) -> list[WebElement]:
        """The answers of the last turn, once all have ended in one of the states."""
        selector = ".turn:last-child .answer"

        def ended() -> list[WebElement]:
            found = self.find(selector)
            busy = self.find(f"{selector}[aria-busy=true]")
            return [] if busy else found

        found: list[WebElement] = self.until(ended)
        assert {one.get_attribute("data-state") for one in found} <= set(states or ("finished", "limit")), self.text(
            ".turn"
        )
        return found

    def sources(self, answer: WebElement) -> list[str]:
        """Where the answer's tokens came from, in order."""
        return [str(token.get_attribute("data-source")) for token in answer.find_elements(By.CSS_SELECTOR, ".token")]

    def set_scheme(self, scheme: str) -> None:
        """As if the system preferred "light" or "dark"."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def nameless(self) -> list[str]:
        """Controls, pictures and landmarks in sight that a screen reader could not name, by role."""
        nodes: list[dict[str, Any]] = self.browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
        shown = [node for node in nodes if not node["ignored"] and node["role"]["value"] in NAMED_ROLES]
        assert shown
        return [node["role"]["value"] for node in shown if not node.get("name", {}).get("value", "").strip()]

    def announced(self) -> str:
        """What was last said to who listens."""
        return str(self.one("#announcer").get_property("textContent"))

    def complaints(self) -> list[str]:
        """What the browser complained about since the last time: errors of scripts, refused resources."""
        entries: list[dict[str, Any]] = self.browser.get_log("browser")  # type: ignore[no-untyped-call]
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]


def text_of(answer: WebElement) -> str:
    """An answer's text, with its spaces and line ends."""
    return str(answer.find_element(By.CSS_SELECTOR, ".tokens").get_property("textContent"))
