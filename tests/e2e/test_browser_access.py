"""What a real browser lets pages do to the service: its own page everything, pages of others nothing."""

from __future__ import annotations

import re
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from selenium.webdriver import Chrome

from service.settings import ServerSettings
from tests.browser import open_browser
from tests.e2e.page import Page, text_of
from tests.e2e.scripted_service import ScriptedService

EVIL, KNOWN = "evil.example", "gpu-box.example"

ASK = """
const [url, method, body, mode, done] = arguments;
fetch(url, {method, body: body ?? undefined, mode, headers: {"Content-Type": "text/plain"}})
  .then(async (answer) => done([answer.type, answer.status, await answer.text()]))
  .catch((error) => done(["error", 0, String(error)]));
"""
"""Sends a request from whatever page is open; gives type, status and text of the answer."""
OPEN_SOCKET = """
const [url, done] = arguments;
const socket = new WebSocket(url);
socket.addEventListener("open", () => done("open"));
socket.addEventListener("error", () => done("error"));
"""
BODY = '{"prompt": "hi", "max_tokens": 1}'
CALLS = (
    ("GET", "/v1/models", None),
    ("GET", "/metrics", None),
    ("GET", "/health/ready", None),
    ("POST", "/v1/completions", BODY),
    ("PUT", "/v1/speculation/x", '{"method": "none"}'),
    ("POST", "/v1/engines/engine-0/drain", ""),
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """A browser in which names of strangers lead to this machine, as after DNS rebinding."""
    rules = f"MAP {EVIL} 127.0.0.1, MAP {KNOWN} 127.0.0.1"
    running = open_browser(tmp_path_factory.mktemp("browser"), flags=[f"--host-resolver-rules={rules}"])
    running.set_script_timeout(30)
    yield running
    running.quit()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedService]:
    with ScriptedService(tmp_path_factory.mktemp("model"), server=ServerSettings(allowed_hosts=(KNOWN,))) as running:
        yield running


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[int]:
    """The port of another site on this machine, with an empty page."""

    class Site(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>elsewhere</title>")

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as site:
        thread = threading.Thread(target=site.serve_forever)
        thread.start()
        yield site.server_port
        site.shutdown()
        thread.join()


def port_of(service: ScriptedService) -> str:
    return service.url.rpartition(":")[2]


def served(service: ScriptedService, route: str, status: int) -> float:
    """How many requests of a route were answered with a status."""
    with urllib.request.urlopen(f"{service.url}/metrics", timeout=30) as response:  # noqa: S310 - our own
        page = response.read().decode()
    found = re.search(rf'requests_total{{route="{re.escape(route)}",status="{status}"}} (\S+)', page)
    return float(found[1]) if found is not None else 0.0


def test_a_page_after_dns_rebinding_reaches_nothing(browser: Chrome, service: ScriptedService) -> None:
    """A page whose own name leads to the service is of one origin with it, and is answered 403 whatever it asks."""
    here = f"http://{EVIL}:{port_of(service)}"
    browser.get(f"{here}/")
    assert "name the host in --allowed-hosts" in browser.page_source
    assert browser.execute_script("return location.origin") == here
    for method, path, body in CALLS:
        kind, status, text = browser.execute_async_script(ASK, here + path, method, body, "same-origin")
        assert (kind, status) == ("basic", 403), path
        assert "foreign_host" in text
    assert browser.execute_async_script(OPEN_SOCKET, f"{here.replace('http', 'ws')}/v1/stream") == "error"
    assert service.front.client.num_live == 0
    assert service.front.experiments.book.profiles.keys() == {"fast"}


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "forerun.localhost", KNOWN])
def test_the_service_s_own_page_works(browser: Chrome, service: ScriptedService, name: str) -> None:
    """Under an address, localhost or an allowed name the page loads, reads, writes and chats over its WebSocket."""
    page = Page(browser, f"http://{name}:{port_of(service)}")
    page.complaints()
    page.open()
    page.ask("hello fox")
    (answer,) = page.answers()
    assert text_of(answer)
    found = browser.execute_async_script(ASK, f"{page.url}/v1/completions", "POST", BODY, "same-origin")
    assert found[:2] == ["basic", 200]
    page.open("engine")
    page.until(lambda: page.find(".tile"))
    # Browsers isolate windows from each other only where they take a connection for safe, as they do this machine's.
    assert [one for one in page.complaints() if "Cross-Origin-Opener-Policy" not in one] == []


@pytest.mark.parametrize("mode", ["no-cors", "cors"])
@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", EVIL])
def test_a_page_of_others_can_neither_write_nor_read(
    browser: Chrome, service: ScriptedService, elsewhere: int, name: str, mode: str
) -> None:
    """A page under another port or name has nothing computed or changed, reads nothing and opens no WebSocket."""
    browser.get(f"http://{name}:{elsewhere}/")
    assert browser.title == "elsewhere"
    done, refused = (served(service, "/v1/completions", status) for status in (200, 403))
    kind, _, text = browser.execute_async_script(ASK, f"{service.url}/v1/completions", "POST", BODY, mode)
    assert (kind, text if kind == "opaque" else "") == ("opaque" if mode == "no-cors" else "error", "")
    assert served(service, "/v1/completions", 200) == done
    assert served(service, "/v1/completions", 403) == refused + 1
    kind, _, text = browser.execute_async_script(ASK, f"{service.url}/v1/models", "GET", None, mode)
    assert (kind, text if kind == "opaque" else "") == ("opaque" if mode == "no-cors" else "error", "")
    socket = f"{service.url.replace('http', 'ws')}/v1/stream"
    assert browser.execute_async_script(OPEN_SOCKET, socket) == "error"


def test_nobody_frames_the_page(browser: Chrome, service: ScriptedService, elsewhere: int) -> None:
    """In a frame of another site the page is not shown: nobody can be led to press its buttons."""
    browser.get(f"http://127.0.0.1:{elsewhere}/")
    script = """
    const [url, done] = arguments;
    const frame = document.createElement("iframe");
    frame.addEventListener("load", () => done(frame.contentDocument === null));
    frame.src = url;
    document.body.append(frame);
    """
    assert browser.execute_async_script(script, f"{service.url}/")
    entries: list[dict[str, Any]] = browser.get_log("browser")  # type: ignore[no-untyped-call]
    assert any("frame-ancestors" in entry["message"] for entry in entries)
