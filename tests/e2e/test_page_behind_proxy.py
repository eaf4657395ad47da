"""The page behind nginx with its defaults, which does not let the WebSocket through."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from tests.e2e.page import Page, text_of
from tests.e2e.scripted_service import ScriptedService
from tests.e2e.test_reverse_proxies import free_port, running
from tests.reverse_proxies import find_program


@pytest.fixture
def proxied(browser: Chrome, scripted: ScriptedService, tmp_path: Path) -> Iterator[Page]:
    """The page as nginx shows it: `Host` is passed on, an upgrade is not."""
    program = find_program("nginx")
    if program is None:
        pytest.skip("nginx is not installed; `make proxies` installs it")
    port = free_port()
    places = "".join(
        f"{name}_temp_path {tmp_path}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = tmp_path / "nginx.conf"
    config.write_text(
        f"daemon off; master_process off; pid {tmp_path}/nginx.pid; error_log stderr; events {{}} "
        "http { access_log off; "
        f"{places} server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass {scripted.url}; "
        "proxy_set_header Host $http_host; } } }"
    )
    command = [program, "-c", str(config), "-p", str(tmp_path), "-e", "stderr"]
    with running(command, tmp_path / "nginx.log", port):
        yield Page(browser, f"http://127.0.0.1:{port}")


def has_finished(answer: WebElement) -> bool:
    """Whether the answer has come to its end."""
    return answer.get_attribute("data-state") == "finished"


def test_answers_come_over_an_event_stream(proxied: Page) -> None:
    """Where the WebSocket is refused, answers come over an event stream, the next ones too, and the page says why."""
    proxied.open()
    proxied.set_number("Seed", "5")
    for question in ("Größe 東京 👩‍👩‍👧 🎉 fox", "and again"):
        proxied.ask(question)
        answer = proxied.answers()[-1]
        proxied.until(partial(has_finished, answer))
        assert question.split()[0] in text_of(answer)
        note = answer.find_element(By.CSS_SELECTOR, ".answer-note").text
        assert "a proxy does not let the WebSocket through" in note
        assert "tokens" in note
    proxied.show_tokens()
    proxied.ask("one more")
    answer = proxied.answers()[-1]
    proxied.until(partial(has_finished, answer))
    assert set(proxied.sources(answer)) == {"unknown"}
