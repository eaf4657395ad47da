"""The configurations of deploy/nginx and deploy/haproxy, with the real programs in front of a real service."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest

from service.event_stream import COMMENT
from tests.reverse_proxies import PROGRAMS, find_program
from tests.tiny_folder import write_tiny_folder

ROOT = Path(__file__).resolve().parents[2]
HOST = "forerun.example"
START_SECONDS = 60.0
CLIENT = "127.0.0.2"
"""Address of the client, which is no trusted proxy's."""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    """Until something listens at the port."""
    ends_at = time.monotonic() + START_SECONDS
    while True:
        assert process.poll() is None, "it ended"
        assert time.monotonic() < ends_at, "it does not listen"
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError:
            time.sleep(0.05)
        else:
            return


@contextmanager
def running(command: list[str], log: Path, port: int) -> Iterator[None]:
    """A program that listens, ended by its process id at the end."""
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL) as process:
        try:
            wait_for(port, process)
            yield
        finally:
            process.terminate()
            process.wait(30)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """A service with a tiny model behind trusted proxies: its port and its log."""
    folder = tmp_path_factory.mktemp("proxied")
    write_tiny_folder(folder / "model")
    port, log = free_port(), folder / "service.log"
    flags = ["--model", str(folder / "model"), "--cache-dir", str(folder / "cache"), "--port", str(port)]
    flags += ["--trusted-proxies", "127.0.0.1", "--allowed-hosts", HOST]
    with running([sys.executable, "-m", "service", *flags], log, port):
        yield port, log


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate of the public name: forerun.crt, forerun.key, and both in forerun.pem."""
    folder = tmp_path_factory.mktemp("certificate")
    cert, key = folder / "forerun.crt", folder / "forerun.key"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={HOST}"]
    names = ["-addext", f"subjectAltName=DNS:{HOST}"]
    subprocess.run([*command, *names, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    (folder / "forerun.pem").write_bytes(cert.read_bytes() + key.read_bytes())
    return folder


def nginx_command(folder: Path, certificate: Path, port: int, upstream: int) -> list[str]:
    """nginx with the shipped configuration, at ports of the test."""
    text = (ROOT / "deploy/nginx/forerun.conf").read_text()
    text = text.replace("127.0.0.1:8000", f"127.0.0.1:{upstream}").replace("listen 443", f"listen 127.0.0.1:{port}")
    text = text.replace("/etc/nginx/", f"{certificate}/")
    places = "".join(
        f"{name}_temp_path {folder}/{name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = folder / "nginx.conf"
    config.write_text(
        f"daemon off;\nmaster_process off;\npid {folder}/nginx.pid;\nerror_log stderr;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{places}{text}\n}}\n"
    )
    return [find_program("nginx") or "", "-c", str(config), "-p", str(folder), "-e", "stderr"]


def haproxy_command(folder: Path, certificate: Path, port: int, upstream: int) -> list[str]:
    """HAProxy with the shipped configuration, at ports of the test."""
    text = (ROOT / "deploy/haproxy/haproxy.cfg").read_text()
    text = text.replace("127.0.0.1:8000", f"127.0.0.1:{upstream}").replace("bind :443", f"bind 127.0.0.1:{port}")
    text = text.replace("/etc/haproxy/", f"{certificate}/").replace("inter 5s", "inter 200ms")
    config = folder / "haproxy.cfg"
    config.write_text(text)
    return [find_program("haproxy") or "", "-f", str(config), "-db"]


@pytest.fixture(params=PROGRAMS)
def proxied(
    request: pytest.FixtureRequest, tmp_path: Path, certificate: Path, service: tuple[int, Path]
) -> Iterator[int]:
    """A proxy in front of the service: its port."""
    if find_program(request.param) is None:
        pytest.skip(f"{request.param} is not installed; `make proxies` installs it")
    port = free_port()
    make = nginx_command if request.param == "nginx" else haproxy_command
    with running(make(tmp_path, certificate, port, service[0]), tmp_path / "proxy.log", port):
        yield port


@pytest.fixture
async def client(certificate: Path, proxied: int) -> AsyncIterator[aiohttp.ClientSession]:
    """A client that reaches the proxy under its public name, and trusts its certificate."""

    class Resolver(aiohttp.abc.AbstractResolver):
        async def resolve(self, host: str, port: int = 0, family: int = 0) -> list[aiohttp.abc.ResolveResult]:
            return [
                {"hostname": host, "host": "127.0.0.1", "port": port, "family": socket.AF_INET, "proto": 0, "flags": 0}
            ]

        async def close(self) -> None:
            pass

    tls = ssl.create_default_context(cafile=str(certificate / "forerun.crt"))
    connector = aiohttp.TCPConnector(ssl=tls, resolver=Resolver(), local_addr=(CLIENT, 0))
    async with aiohttp.ClientSession(f"https://{HOST}:{proxied}", connector=connector) as session:
        async with asyncio.timeout(START_SECONDS):
            while True:
                async with session.get("/health") as response:
                    if response.status == 200:
                        break
                await asyncio.sleep(0.1)
        yield session


async def test_everything_works_behind_a_proxy(
    client: aiohttp.ClientSession, proxied: int, service: tuple[int, Path]
) -> None:
    """The page, its POSTs, event streams and the WebSocket work under the public name; the log has the client."""
    origin = {"Origin": f"https://{HOST}:{proxied}"}
    async with client.get("/") as response:
        assert response.status == 200
        assert "forerun" in await response.text()
    body = {"prompt": [5, 6, 7], "max_tokens": 40, "ignore_eos": True, "seed": 7}
    given = {**origin, "X-Request-Id": f"behind-{proxied}", "X-Forwarded-For": "6.6.6.6"}
    async with client.post("/v1/completions", json=body, headers=given) as response:
        assert response.status == 200, await response.text()
        whole = (await response.json())["choices"][0]["text"]
    async with client.post("/v1/completions", json={**body, "stream": True}, headers=origin) as response:
        assert response.content_type == "text/event-stream"
        text = await response.text()
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert "".join(choice["text"] for event in events for choice in event["choices"]) == whole
    assert text.endswith("data: [DONE]\n\n")
    async with client.ws_connect("/v1/stream", headers=origin) as socket_:
        await socket_.send_json({"type": "generate", "id": "a", "request": body})
        kinds: list[str] = []
        while not kinds or kinds[-1] not in {"finished", "error"}:
            kinds.append((await socket_.receive_json(timeout=30))["type"])
    assert kinds[0] == "started"
    assert kinds[-1] == "finished"
    async with client.post("/v1/completions", json=body, headers={"Origin": "https://evil.example"}) as response:
        assert response.status == 403
    async with client.get("/metrics") as response:
        assert response.status == 403
    lines = [json.loads(line) for line in service[1].read_text().splitlines() if line.startswith("{")]
    (line,) = [line for line in lines if line.get("request_id") == f"behind-{proxied}" and line["event"] == "request"]
    assert line["client"] == CLIENT


async def test_a_stream_is_not_buffered(client: aiohttp.ClientSession, service: tuple[int, Path]) -> None:
    """What the service sends while its engine is stopped reaches the client before the engine goes on."""
    lines = [json.loads(line) for line in service[1].read_text().splitlines() if line.startswith("{")]
    (engine,) = [line["pid"] for line in lines if line["event"] == "engine ready"]
    body = {"prompt": [5, 6, 7], "max_tokens": 5, "ignore_eos": True, "stream": True}
    os.kill(engine, signal.SIGSTOP)
    try:
        async with client.post("/v1/completions", json=body) as response, asyncio.timeout(30):
            assert response.status == 200, await response.text()
            assert await response.content.readany() == COMMENT
            os.kill(engine, signal.SIGCONT)
            assert (await response.content.read()).endswith(b"data: [DONE]\n\n")
    finally:
        os.kill(engine, signal.SIGCONT)


@pytest.mark.parametrize("name", ["deploy/systemd/forerun.service", "deploy/kubernetes/forerun.yaml"])
def test_the_other_files_are_well_formed(name: str) -> None:
    """The unit and the manifest parse, and name probes, the fetch and settings that are there."""
    import yaml

    text = (ROOT / name).read_text()
    if name.endswith(".service"):
        assert "ExecStart=" in text
        assert "forerun fetch" in text
        return
    kinds = {document["kind"]: document for document in yaml.safe_load_all(text)}
    assert set(kinds) == {"Deployment", "ConfigMap", "Service"}
    pod = kinds["Deployment"]["spec"]["template"]["spec"]
    assert pod["enableServiceLinks"] is False
    probes = {pod["containers"][0][f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert probes == {"/health/ready", "/health/live"}
    variables = {entry["name"]: str(entry["value"]) for entry in pod["containers"][0]["env"]}
    from service.settings import load_settings

    settings = load_settings([], {**variables, "PATH": os.environ.get("PATH", "")})
    assert settings.server.host == "0.0.0.0"
