"""Under which names a service answers, and which pages of a browser it takes for its own."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from service.app import create_app
from service.hosts import AllowedHosts, is_loopback, is_own_origin
from service.pool.settings import TenantSettings
from service.server import exposure_warning, greeting
from service.settings import ServerSettings, Settings, SettingsError, load_settings
from tests.service.conftest import Service, StartService

EVIL = "evil.example"
# fmt: off
REFUSED = (
    "", EVIL, f"{EVIL}:8000", "localhost.evil.example", "notlocalhost", "127.0.0.1.evil.example", "127.1",
    "2130706433", "0x7f000001", "0177.0.0.1", "127.0.0.1:80:80", "127.0.0.1@evil.example",
    "evil.example#127.0.0.1", "[::1", "[evil]", "localhost/", "localhost,evil.example", "gpu-box.evil.example",
    ".", ":8000", "localhost:99999999", "[]", "localhost evil.example",
)
# fmt: on
# fmt: off
ALLOWED = (
    "127.0.0.1", "127.0.0.1:8000", "10.1.2.3:80", "[::1]", "[::1]:8000", "[FE80::1]:1", "localhost",
    "localhost:8000", "LocalHost", "localhost.", "localhost.:8000", "forerun.localhost:8000", "gpu-box",
    "GPU-box.:8000", "127.0.0.1.", "under_score:1", "xn--bcher-kva.example",
)
# fmt: on


async def raw(service: Service, request: str) -> tuple[int, str, bytes]:
    """Status, head and body of an answer to bytes that no HTTP client would send."""
    host, port = service.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request.encode("latin-1"))
    async with asyncio.timeout(20):
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        length = re.search(r"(?i)content-length: (\d+)", head)
        body = await reader.readexactly(int(length[1])) if length is not None else b""
    writer.close()
    return int(head.split()[1]), head, body


@pytest.mark.parametrize(
    "host",
    ALLOWED,
)
def test_addresses_localhost_and_allowed_names_are_allowed(host: str) -> None:
    """Whatever the port and the spelling, as browsers and other clients write them."""
    assert AllowedHosts(["gpu-box", "under_score", "XN--bcher-kva.example."]).allows(host)


@pytest.mark.parametrize(
    "host",
    REFUSED,
)
def test_other_names_are_not_allowed(host: str) -> None:
    """No name that somebody else may point at this machine, and nothing that is no name."""
    assert not AllowedHosts(["gpu-box"]).allows(host)


def test_any_name_can_be_allowed() -> None:
    """An asterisk allows whatever comes; an address needs no entry and does no harm."""
    assert AllowedHosts(["*"]).allows(EVIL)
    assert not AllowedHosts(["::1", "0.0.0.0"]).allows(EVIL)


@pytest.mark.parametrize("name", ["gpu:8000", "http://gpu", "a b", "", "*.example.com"])
def test_an_entry_that_matches_nothing_is_told(name: str) -> None:
    """The error names the setting and what is right."""
    with pytest.raises(ValueError, match=r"allowed_hosts has .* must be a host's name without a port"):
        AllowedHosts([name])


def test_allowed_hosts_come_from_file_variable_and_flag(tmp_path: Path) -> None:
    """A list in the file, words between commas elsewhere; what is no list is told."""
    file = tmp_path / "forerun.toml"
    file.write_text('[server]\nallowed_hosts = ["a", "b"]\n')
    assert load_settings(["--config", str(file)], {}).server.allowed_hosts == ("a", "b")
    assert load_settings([], {"FORERUN_ALLOWED_HOSTS": "a, b,"}).server.allowed_hosts == ("a", "b")
    assert load_settings(["--allowed-hosts", "a"], {}).server.allowed_hosts == ("a",)
    file.write_text('[server]\nallowed_hosts = "a"\n')
    with pytest.raises(SettingsError, match="allowed_hosts"):
        load_settings(["--config", str(file)], {})


async def test_every_route_refuses_a_foreign_host(start_service: StartService) -> None:
    """After DNS rebinding a page's requests name its own host: every route, page and probes too, answers 403."""
    service = await start_service(server=ServerSettings(allowed_hosts=("gpu-box",)))
    for route in service.app.router.routes():
        path = re.sub(r"\{[^}]+\}", "x", route.resource.canonical if route.resource is not None else "")
        headers = {"Host": EVIL, "Origin": f"http://{EVIL}"}
        async with service.client.request(route.method, service.url + path, headers=headers, data=b"{}") as response:
            assert response.status == 403, path
            if route.method != "HEAD":
                error = (await response.json())["error"]
                assert error["code"] == "foreign_host"
                assert "name the host in --allowed-hosts" in error["message"]
    assert (await service.get("/nowhere", headers={"Host": EVIL}))[0] == 403
    with pytest.raises(aiohttp.WSServerHandshakeError, match="403"):
        await service.client.ws_connect(f"{service.url}/v1/stream", headers={"Host": EVIL, "Origin": f"http://{EVIL}"})
    for host in ("gpu-box:8000", "localhost:1", "[::1]"):
        assert (await service.get("/health/live", headers={"Host": host}))[0] == 200
        headers = {"Host": host, "Origin": f"http://{host}"}
        assert (await service.post("/v1/completions", {"prompt": "hi", "max_tokens": 1}, headers=headers))[0] == 200
        async with service.client.ws_connect(f"{service.url}/v1/stream", headers=headers) as ends:
            assert not ends.closed


@pytest.mark.parametrize(
    ("request_line", "host", "status"),
    [
        ("GET /health/live HTTP/1.0", None, 200),
        ("GET /health/live HTTP/1.0", EVIL, 403),
        ("GET /health/live HTTP/1.1", None, 400),
        ("GET /health/live HTTP/1.1", "", 403),
        ("GET /health/live HTTP/1.1", f"localhost\r\nHost: {EVIL}", 400),
        ("GET http://localhost/health/live HTTP/1.1", "localhost", 200),
        ("GET http://[::1]:8000/health/live HTTP/1.1", "[::1]:8000", 200),
        (f"GET http://{EVIL}/health/live HTTP/1.1", "localhost", 403),
        ("GET http://localhost/health/live HTTP/1.1", EVIL, 403),
        ("GET /health/live HTTP/1.1", "x" * 4000, 403),
    ],
)
async def test_unusual_forms_of_a_host(service: Service, request_line: str, host: str | None, status: int) -> None:
    """Without one (HTTP/1.0), twice, in the request's target: none leads past the check, and errors stay short."""
    line = "" if host is None else f"Host: {host}\r\n"
    found, _, body = await raw(service, f"{request_line}\r\n{line}Connection: close\r\n\r\n")
    assert found == status
    assert len(body) < 500


async def test_with_keys_the_host_does_not_matter(start_service: StartService, tmp_path: Path) -> None:
    """A page cannot know a key; so a service that asks for one answers under any name."""
    (tmp_path / "keys").write_text("somebody key\n")
    service = await start_service(tenants=TenantSettings(api_keys_file=str(tmp_path / "keys")))
    headers = {"Host": EVIL, "Authorization": "Bearer key"}
    assert (await service.get("/v1/models", headers=headers))[0] == 200
    assert (await service.get("/v1/models", headers={"Host": EVIL}))[0] == 401


async def test_a_proxy_s_headers_do_not_replace_the_host_check(start_service: StartService) -> None:
    """With the tenants' header alone a page could send it itself: the host is compared as without."""
    service = await start_service(tenants=TenantSettings(tenant_header="X-Tenant"))
    assert (await service.get("/v1/models", headers={"Host": EVIL, "X-Tenant": "a"}))[0] == 403
    assert (await service.get("/v1/models", headers={"X-Tenant": "a"}))[0] == 200


@pytest.mark.parametrize(
    ("origin", "host", "scheme", "is_own"),
    [
        ("http://localhost:8000", "localhost:8000", None, True),
        ("http://localhost", "localhost", None, True),
        ("http://localhost", "LOCALHOST:80", None, True),
        ("http://[::1]:8000", "[::1]:8000", None, True),
        ("https://forerun.example", "forerun.example", None, True),
        ("https://forerun.example", "forerun.example", "https", True),
        ("https://forerun.example", "forerun.example:443", "https", True),
        ("https://forerun.example:8443", "forerun.example:8443", "HTTPS", True),
        ("https://forerun.example", "forerun.example", "http, https", True),
        ("http://forerun.example", "forerun.example", "https", False),
        ("https://forerun.example", "forerun.example", "http", False),
        ("https://forerun.example", "forerun.example:80", None, False),
        ("http://localhost:8001", "localhost:8000", None, False),
        ("http://localhost", "localhost:8000", None, False),
        ("http://127.0.0.1:8000", "localhost:8000", None, False),
        ("null", "null", None, False),
        ("x://y://localhost:8000", "localhost:8000", None, False),
        ("localhost:8000", "localhost:8000", None, False),
        ("ftp://localhost:8000", "localhost:8000", None, False),
        ("http://localhost:8000/", "localhost:8000", None, False),
        ("http://user@localhost:8000", "localhost:8000", None, False),
        ("http://evil.example", "localhost:8000", None, False),
        ("", "", None, False),
        ("http://", "", None, False),
    ],
)
def test_an_origin_is_the_service_s_own(origin: str, host: str, scheme: str | None, *, is_own: bool) -> None:
    """Scheme, name and port are compared as browsers send them, also behind a proxy that ends TLS."""
    assert is_own_origin(origin, host, scheme) is is_own


async def test_a_page_behind_a_tls_proxy_works(service: Service) -> None:
    """A proxy that ends TLS passes `Host` and, if it says so, the scheme: its page posts and opens the WebSocket."""
    host = {"Host": "forerun.localhost"}
    body = {"prompt": "hi", "max_tokens": 1}
    for forwarded in ({}, {"X-Forwarded-Proto": "https"}):
        own = {**host, **forwarded, "Origin": "https://forerun.localhost"}
        assert (await service.post("/v1/completions", body, headers=own))[0] == 200
        async with service.client.ws_connect(f"{service.url}/v1/stream", headers=own) as ends:
            assert not ends.closed
    foreign = {**host, "X-Forwarded-Proto": "https", "Origin": "http://forerun.localhost"}
    status, answer = await service.post("/v1/completions", body, headers=foreign)
    assert (status, answer["error"]["code"]) == (403, "foreign_origin")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost", "LOCALHOST."])
def test_loopback_is_no_exposure(host: str) -> None:
    """Nothing is warned of where only this machine reaches the service."""
    assert is_loopback(host)
    assert exposure_warning(Settings(server=ServerSettings(host=host))) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "gpu-box"])
def test_a_service_without_keys_that_others_reach_is_warned_of(host: str) -> None:
    """The warning says what whoever reaches the port may do, and what ends that; with keys there is none."""
    server = ServerSettings(host=host)
    assert "drain engines" in str(exposure_warning(Settings(server=server)))
    header = Settings(server=server, tenants=TenantSettings(tenant_header="X-Tenant"))
    assert "trusted proxy" in str(exposure_warning(header))
    keys = Settings(server=server, tenants=TenantSettings(api_keys_file="keys"))
    assert exposure_warning(keys) is None


async def test_who_starts_it_reads_the_warning(start_service: StartService) -> None:
    """What the service prints when it is ready says that other machines reach it and what they may do; else not."""
    service = await start_service(server=ServerSettings(host="0.0.0.0"))
    assert "Other machines can reach it, and it asks for no keys" in greeting(service.front, service.url)
    service = await start_service()
    assert "Other machines" not in greeting(service.front, service.url)


@pytest.mark.parametrize("host", ["::", "::1", "0.0.0.0", "", "gpu-box"])
def test_whatever_is_listened_on_can_be_asked_for(model_folder: Path, host: str) -> None:
    """The host that the service listens on needs no second mention."""
    engine: dict[str, Any] = {"model": str(model_folder)}
    settings = msgspec.convert({"server": {"host": host}, "engine": engine}, Settings)
    assert create_app(settings, ["true"]) is not None
