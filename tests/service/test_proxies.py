"""A service behind proxies, for pages of other origins, and over HTTPS of its own."""

from __future__ import annotations

import asyncio
import re
import ssl
import subprocess
from pathlib import Path
from unittest.mock import Mock

import aiohttp
import pytest
from multidict import CIMultiDict
from structlog.testing import capture_logs

from service.app import create_app
from service.cross_origin import AllowedOrigins
from service.peers import Peer, TrustedProxies
from service.server import create_runner, listen, tls_context, url_of
from service.settings import ServerSettings, Settings
from speculation.settings import EngineSettings
from tests.service.conftest import Service, StartService, scripted_command

APP = "https://app.example"
CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def peer(remote: str, *networks: str, **headers: str) -> Peer:
    named = CIMultiDict({name.replace("_", "-"): value for name, value in headers.items()})
    request = Mock(remote=remote, headers=named, host="service:8000")
    return TrustedProxies(networks).peer_of(request)


@pytest.mark.parametrize(
    ("remote", "forwarded", "client"),
    [
        ("10.0.0.1", "203.0.113.9", "203.0.113.9"),
        ("10.0.0.1", "6.6.6.6, 203.0.113.9", "203.0.113.9"),
        ("10.0.0.1", "203.0.113.9, 10.0.0.2", "203.0.113.9"),
        ("10.0.0.1", "10.0.0.3, 10.0.0.2", "10.0.0.3"),
        ("10.0.0.1", "unknown", "10.0.0.1"),
        ("10.0.0.1", "203.0.113.9, nonsense", "10.0.0.1"),
        ("10.0.0.1", "", "10.0.0.1"),
        ("203.0.113.1", "6.6.6.6", "203.0.113.1"),
        ("::ffff:10.0.0.1", "2001:db8::1", "2001:db8::1"),
        ("10.0.0.1", "203.0.113.9:4711", "203.0.113.9"),
        ("10.0.0.1", "[2001:db8::1]:443", "2001:db8::1"),
        ("10.0.0.1", "::ffff:203.0.113.9", "203.0.113.9"),
        ("10.0.0.1", "fe80::1%any", "10.0.0.1"),
    ],
)
def test_the_client_is_the_last_address_that_is_no_trusted_proxy(remote: str, forwarded: str, client: str) -> None:
    """`X-Forwarded-For` is read from its end, and only of a trusted proxy."""
    assert peer(remote, "10.0.0.0/8", X_Forwarded_For=forwarded).address == client


def test_the_forwarded_host_is_a_trusted_proxy_s() -> None:
    """`X-Forwarded-Host` replaces `Host` where a trusted proxy sent it, and only then."""
    assert peer("10.0.0.1", "10.0.0.1", Host="a", X_Forwarded_Host="b").host == "b"
    assert peer("10.0.0.2", "10.0.0.1", Host="a", X_Forwarded_Host="b").host == "a"
    assert peer("10.0.0.1", Host="a", X_Forwarded_Host="b", X_Forwarded_For="c") == Peer("10.0.0.1", "a")


@pytest.mark.parametrize("wrong", ["proxy.example", "10.0.0.0/99", ""])
def test_wrong_proxies_and_origins_are_named(wrong: str) -> None:
    """Settings that name no network, or no origin, end the start with a sentence."""
    with pytest.raises(ValueError, match="trusted_proxies has"):
        TrustedProxies([wrong])
    with pytest.raises(ValueError, match="allowed_origins has"):
        AllowedOrigins([wrong])


async def test_a_page_behind_a_proxy_is_the_service_s_own(start_service: StartService) -> None:
    """With a trusted proxy's `X-Forwarded-Host`, POSTs of the page at the public name pass; the log has the client."""
    server = ServerSettings(trusted_proxies=("127.0.0.1",), allowed_hosts=("forerun.example",))
    service = await start_service(server=server)
    headers = {
        "Origin": "https://forerun.example",
        "X-Forwarded-Host": "forerun.example",
        "X-Forwarded-Proto": "https",
        "X-Forwarded-For": "203.0.113.9",
    }
    with capture_logs() as logs:
        assert (await service.post(CHAT, BODY, headers=headers))[0] == 200
    assert [entry["client"] for entry in logs if entry["event"] == "request"] == ["203.0.113.9"]
    assert (await service.post(CHAT, BODY, headers=headers | {"Origin": "https://evil.example"}))[0] == 403
    assert (await service.post(CHAT, BODY, headers=headers | {"X-Forwarded-Host": "evil.example"}))[0] == 403
    rebound = {"Host": "evil.example", "X-Forwarded-Host": "localhost"}
    assert (await service.get("/v1/models", headers=rebound))[0] == 403
    untrusting = await start_service(server=ServerSettings(allowed_hosts=("forerun.example",)))
    assert (await untrusting.post(CHAT, BODY, headers=headers))[0] == 403


@pytest.fixture
async def shared(start_service: StartService) -> Service:
    """A service that pages of one other origin may use."""
    return await start_service(server=ServerSettings(allowed_origins=(f"{APP}:443", "app://desktop")))


async def test_a_page_of_an_allowed_origin_may_ask(shared: Service) -> None:
    """The preflight is answered, the request is served, streamed or not, and the page may read it and its headers."""
    ask = {"Origin": APP, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    async with shared.client.options(shared.url + CHAT, headers=ask) as response:
        assert response.status == 204
        assert response.headers["Access-Control-Allow-Origin"] == APP
        assert response.headers["Access-Control-Allow-Methods"] == "POST"
        assert response.headers["Access-Control-Allow-Headers"] == "authorization"
    for stream in (False, True):
        body = {**BODY, "stream": stream}
        async with shared.client.post(shared.url + CHAT, json=body, headers={"Origin": APP}) as response:
            assert response.status == 200
            assert response.headers["Access-Control-Allow-Origin"] == APP
            assert "X-Forerun-Ignored" in response.headers["Access-Control-Expose-Headers"]
            assert response.headers["Vary"] == "Origin"
    async with shared.client.post(shared.url + CHAT, json={}, headers={"Origin": APP}) as response:
        assert (response.status, response.headers["Access-Control-Allow-Origin"]) == (400, APP)
    async with shared.client.ws_connect(f"{shared.url}/v1/stream", headers={"Origin": APP}) as socket:
        await socket.close()


async def test_pages_of_other_origins_are_refused(shared: Service, service: Service) -> None:
    """An origin that is not allowed gets no preflight, no answer and no header; without the setting none is allowed."""
    for where, origin in ((shared, "https://evil.example"), (service, APP)):
        ask = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        async with where.client.options(where.url + CHAT, headers=ask) as response:
            assert response.status == 405
            assert "Access-Control-Allow-Origin" not in response.headers
        async with where.client.post(where.url + CHAT, json=BODY, headers={"Origin": origin}) as response:
            assert response.status == 403
            error = (await response.json())["error"]
            assert (error["code"], "--allowed-origins" in error["message"]) == ("foreign_origin", True)
            assert "Access-Control-Allow-Origin" not in response.headers
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await where.client.ws_connect(f"{where.url}/v1/stream", headers={"Origin": origin})


def certificate(folder: Path) -> tuple[str, str]:
    """A certificate of 127.0.0.1 that it has signed itself, and its key."""
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=forerun"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, *names, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


async def test_clients_are_served_over_https(tmp_path: Path, model_folder: Path) -> None:
    """With `--server-cert` and `--server-key`, requests, streams and WebSockets are encrypted; the address is https."""
    cert, key = certificate(tmp_path)
    server = ServerSettings(server_cert=cert, server_key=key, header_seconds=2.0)
    settings = Settings(server=server, engine=EngineSettings(model=str(model_folder)))
    runner = create_runner(create_app(settings, scripted_command(settings)))
    await runner.setup()
    try:
        await listen(runner, "127.0.0.1", 0)
        url = url_of(runner)
        assert url.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=cert)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting)) as client:
            async with asyncio.timeout(20):
                while (await client.get(f"{url}/health")).status != 200:
                    await asyncio.sleep(0.05)
            async with client.post(url + CHAT, json={**BODY, "stream": True}) as response:
                assert (await response.read()).endswith(b"data: [DONE]\n\n")
            async with client.ws_connect(f"{url}/v1/stream") as socket:
                await socket.send_json({"type": "generate", "id": "a", "request": {"prompt": "hi"}})
                assert (await socket.receive_json())["type"] == "started"
        host, port = "127.0.0.1", int(url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection(host, port)  # says nothing: no handshake
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()
    finally:
        await runner.cleanup()


def test_wrong_files_of_https_are_named(tmp_path: Path) -> None:
    """A file that is missing, or not what it should be, is a sentence with its setting and its name."""
    file = tmp_path / "none.pem"
    for server in (
        ServerSettings(server_cert=str(file)),
        ServerSettings(server_key=str(file)),
        ServerSettings(server_cert=str(file), server_key=str(file)),
    ):
        with pytest.raises(ValueError, match=r"server_cert|server_key"):
            tls_context(server)
    file.write_text("no certificate")
    with pytest.raises(ValueError, match=re.escape(str(file))):
        tls_context(ServerSettings(server_cert=str(file), server_key=str(file)))
    assert tls_context(ServerSettings()) is None


def test_an_encrypted_key_is_refused_and_not_asked_about(tmp_path: Path) -> None:
    """A private key with a password ends the start with a sentence; nothing waits for a terminal."""
    cert, key = certificate(tmp_path)
    locked = str(tmp_path / "locked.pem")
    command = ["openssl", "rsa", "-aes256", "-passout", "pass:secret", "-in", key, "-out", locked]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(ValueError, match="encrypted"):
        tls_context(ServerSettings(server_cert=cert, server_key=locked))
