"""A real browser for tests: the system's Chromium without a window, driven through its own driver.

`python -m tests.browser` prints the browser that would be used, and exits with 1 if there is none.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

FLAGS = (
    "--headless",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def find_browser() -> tuple[str, str] | None:
    """The browser named by FORERUN_TEST_CHROMIUM, else the one on PATH; and the driver beside it on PATH."""
    names = [os.environ.get("FORERUN_TEST_CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome"]
    browser = next((found for name in names if name and (found := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


def open_browser(profile: Path, width: int = 1280, height: int = 860, flags: Sequence[str] = ()) -> webdriver.Chrome:
    """A browser with a new profile in an empty folder, and flags of its own. Raises RuntimeError if there is none.

    Its console is kept, so that a test can see that nothing went wrong there.
    """
    found = find_browser()
    if found is None:
        raise RuntimeError("no Chromium with chromedriver: run `make browser`, or name one in FORERUN_TEST_CHROMIUM")
    options = Options()
    options.binary_location, driver = found
    for flag in (*FLAGS, *flags, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
        options.add_argument(flag)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=Service(driver))


if __name__ == "__main__":
    found = find_browser()
    print(" ".join(found) if found else "no Chromium with chromedriver found", file=sys.stdout if found else sys.stderr)
    sys.exit(found is None)
