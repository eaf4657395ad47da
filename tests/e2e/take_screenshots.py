"""Takes the pictures in docs/screenshots: `python -m tests.e2e.take_screenshots FOLDER`, with a service of its own.

What they show is real: the embedded model, its engine, and an experiment on traffic that this command sends.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.common.by import By

from tests.browser import open_browser
from tests.e2e.page import Page
from tests.e2e.server import Server

WIDTH, HEIGHT, DENSITY = 1280, 940, 1.5
CODE = "Write a Python class Point with x and y, and the methods __add__ and __sub__. Only the code."
MOST_TOKENS = "112"
PREDICTED = """```python
class Point:
    def __init__(self, x, y):
        self.x = x
        self.y = y
```"""
EXPERIMENT = {
    "name": "lookup-on-copies",
    "hypothesis": "Prompt lookup pays where answers quote the prompt",
    "arms": [
        {"name": "plain", "speculation": {"method": "none"}},
        {"name": "ngram", "speculation": {"method": "ngram", "num_speculative_tokens": 4}},
    ],
    "expected_effect": 0.5,
    "max_samples": 5000,
    "guardrails": [{"metric": "error_rate", "limit": 0.2}],
}
WORDS = ("amber", "basalt", "cedar", "delta", "ember", "fjord", "granite", "harbor", "indigo", "juniper", "kelp")


def post(url: str, body: object) -> None:
    data = json.dumps(body).encode()
    with urllib.request.urlopen(url, data, timeout=120) as response:  # noqa: S310 - our own address
        response.read()


def send_copies(url: str, number: int) -> None:
    """One request whose answer quotes its prompt."""
    words = ", ".join(random.Random(number).choices(WORDS, k=12))
    message = {"role": "user", "content": f"Repeat this list exactly, twice: {words}."}
    body = {"messages": [message], "temperature": 0, "max_tokens": 40, "ignore_eos": True}
    post(f"{url}/v1/chat/completions", body)


def save(page: Page, folder: Path, name: str) -> None:
    """The page as it is now, in light and in dark."""
    for scheme in ("light", "dark"):
        page.set_scheme(scheme)
        page.browser.save_screenshot(str(folder / f"{name}-{scheme}.png"))
    page.set_scheme("light")


def race(page: Page, folder: Path) -> None:
    """Two configs side by side, one token telling of itself."""
    page.open()
    page.show_tokens()
    page.choose(".settings select", "suffix")
    page.one("#compare").click()
    page.set_number("Seed", "7")
    page.set_number("Temperature", "0")
    page.set_number("Max tokens", MOST_TOKENS)
    page.ask(CODE)
    left, _ = page.answers()
    page.until(lambda: page.text(".verdict"))
    ActionChains(page.browser).move_to_element(left.find_elements(By.CSS_SELECTOR, "[data-source=suffix]")[5]).perform()
    save(page, folder, "race")


def predicted(page: Page, folder: Path) -> None:
    """One answer that several proposers guessed at, in order, as it is read."""
    page.open()
    page.show_tokens(on=False)
    page.choose(".settings select", "custom")
    page.choose(".parameters select", "first")
    page.one(".parameters input").send_keys("prediction, suffix")
    page.find(".settings summary")[-1].click()
    page.find(".settings textarea")[-1].send_keys(PREDICTED)
    page.set_number("Temperature", "0")
    page.set_number("Max tokens", MOST_TOKENS)
    page.ask(CODE)
    page.answers()
    page.until(lambda: page.find(".markdown pre"))
    ActionChains(page.browser).move_to_element(page.one(".wordmark")).perform()
    save(page, folder, "playground")


def experiment(page: Page, folder: Path, num_requests: int) -> None:
    """An experiment that has found something, while it is being watched; and the engine under its traffic."""
    post(f"{page.url}/v1/experiments", EXPERIMENT)
    with ThreadPoolExecutor(4) as clients:
        page.open("experiments/lookup-on-copies")
        half = num_requests // 2
        list(clients.map(partial(send_copies, page.url), range(half)))
        page.open("engine")
        page.until(lambda: page.find(".tile"))
        rest = clients.map(partial(send_copies, page.url), range(half, num_requests))
        for _ in range(half // 2):
            next(rest)
        save(page, folder, "engine")
        list(rest)
    page.open("experiments/lookup-on-copies")
    page.until(lambda: page.find("polygon.band"))
    page.one("body").send_keys(Keys.NULL)
    save(page, folder, "experiment")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--requests", type=int, default=400, help="sent to the experiment")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, Server(Path(scratch, "log")) as server:
        browser = open_browser(Path(scratch, "browser"), WIDTH, HEIGHT)
        try:
            metrics = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": DENSITY, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            page = Page(browser, server.url)
            # The engine learns what its steps cost.
            for number in range(30):
                send_copies(server.url, -number)
            race(page, chosen.folder)
            predicted(page, chosen.folder)
            experiment(page, chosen.folder, chosen.requests)
        finally:
            browser.quit()


if __name__ == "__main__":
    main()
