"""Certificates that are wrong: expired, not valid yet, of another CA, or absent on one side."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from service.pool.settings import PoolSettings
from tests.service.conftest import StartService
from tests.service.pool.standalone import StartEngine
from tests.service.pool.test_failover import TEXT, ask, body
from tests.service.pool.test_strangers import make_certificates, openssl

DATES = {"expired": ("20200101000000Z", "20200102000000Z"), "future": ("20900101000000Z", "20900102000000Z")}


async def sign(folder: Path, name: str, valid_from: str, valid_until: str) -> None:
    """Write a certificate of the pool's CA for the key that is there, valid between two dates."""
    config = folder / "ca.conf"
    (folder / "index.txt").write_text("")
    config.write_text(
        f"[ca]\ndefault_ca = pool\n[pool]\ndatabase = {folder}/index.txt\nnew_certs_dir = {folder}\nrand_serial = yes\n"
        "default_md = sha256\npolicy = any\nunique_subject = no\n[any]\ncommonName = supplied\n"
    )
    await openssl(
        *("ca", "-batch", "-config", str(config), "-in", str(folder / "request.pem"), "-notext"),
        *("-cert", str(folder / "ca.pem"), "-keyfile", str(folder / "ca-key.pem")),
        *("-startdate", valid_from, "-enddate", valid_until, "-out", str(folder / f"{name}-cert.pem")),
    )


@pytest.fixture
async def certificates(tmp_path: Path) -> Path:
    """A folder with what `make_certificates` makes, and certificates that are not valid now."""
    await make_certificates(tmp_path)
    for name, dates in DATES.items():
        await sign(tmp_path, name, *dates)
    return tmp_path


def tls(folder: Path, name: str = "") -> dict[str, str]:
    """The settings for one kind of certificate; all but the foreign one have the pool's own key and CA."""
    prefix = "other-" if name == "foreign" else ""
    cert = f"{name}-cert" if name in DATES else f"{prefix}cert"
    return {
        "tls_cert": str(folder / f"{cert}.pem"),
        "tls_key": str(folder / f"{prefix}key.pem"),
        "tls_ca": str(folder / f"{prefix}ca.pem"),
    }


def flags(settings: dict[str, str]) -> list[str]:
    return [word for name, path in settings.items() for word in (f"--{name.replace('_', '-')}", path)]


KINDS = ["expired", "future", "foreign", "plain"]
OF_ENGINE = {
    "expired": "no TLS handshake: certificate has expired",
    "future": "no TLS handshake: certificate is not yet valid",
    "foreign": "no TLS handshake: certificate signature failure",
    "plain": "the other side does not speak TLS",
}
"""What a good front says of an engine with each kind of certificate."""
OF_FRONT = {
    "expired": "if it refuses this front's certificate, see tls_cert",
    "future": "if it refuses this front's certificate, see tls_cert",
    "foreign": "no TLS handshake: certificate signature failure",
    "plain": "it said nothing within 5 s; engines with certificates need tls_cert",
}
"""What a front with each kind of certificate says of a good engine."""


def reasons(logs: Sequence[Mapping[str, object]], port: int) -> list[str]:
    """Why an engine was not connected, each time."""
    refusals = [entry for entry in logs if entry["event"] == "engine not connected"]
    return [str(entry["reason"]) for entry in refusals if str(entry["address"]).endswith(f":{port}")]


def is_refused(logs: Sequence[Mapping[str, object]], port: int) -> bool:
    return bool(reasons(logs, port))


@pytest.mark.slow
async def test_engines_whose_certificates_are_refused(
    start_service: StartService, start_engine: StartEngine, pool: PoolSettings, certificates: Path
) -> None:
    """A front says why it refuses each, tries ever less often, and serves on; one that gets a good file is found."""
    good = tls(certificates)
    await start_engine(*flags(good))
    service = await start_service(pool=msgspec.structs.replace(pool, **good))
    wanted = await ask(service, body(1))
    with capture_logs() as logs:
        settings = [tls(certificates, kind) if kind != "plain" else {} for kind in KINDS]
        engines = await asyncio.gather(*(start_engine(*flags(each)) for each in settings))
        await service.until(lambda: all(len(reasons(logs, engine.port)) > 1 for engine in engines))
        assert await asyncio.gather(*(ask(service, body(1)) for _ in range(4))) == [wanted] * 4
    for kind, engine in zip(KINDS, engines, strict=True):
        told = reasons(logs, engine.port)
        assert all(OF_ENGINE[kind] in reason and good["tls_ca"] in reason for reason in told), told
        assert len(told) < 8
        assert ("others will refuse tls_cert" in engine.log()) == (kind in DATES), engine.log()
    assert "it speaks TLS, and this side has no certificates" in engines[-1].log()
    assert len(service.front.client.serving) == 1
    await engines[0].stop()
    shutil.copy(good["tls_cert"], settings[0]["tls_cert"])
    await start_engine(*flags(settings[0]))
    await service.until(lambda: len(service.front.client.serving) == 2)


async def test_fronts_whose_certificates_are_refused(
    start_service: StartService, start_engine: StartEngine, pool: PoolSettings, certificates: Path
) -> None:
    """Each front and the engine say what is wrong, and a front with a good certificate is served all the while."""
    good = tls(certificates)
    engine = await start_engine(*flags(good))
    for kind in KINDS:
        bad = tls(certificates, kind) if kind != "plain" else {}
        with capture_logs() as logs:
            front = await start_service(pool=msgspec.structs.replace(pool, **bad), wait=False)
            await front.until(partial(is_refused, logs, engine.port))
        told = reasons(logs, engine.port)
        assert OF_FRONT[kind] in told[0], told
        assert "secrets differ" not in told[0]
        assert not front.front.is_ready
        warnings = [entry for entry in logs if entry["event"] == "others will refuse tls_cert"]
        assert [entry["tls_cert"] for entry in warnings] == ([bad["tls_cert"]] if kind in DATES else [])
        await front.app.cleanup()
    assert "no TLS handshake: certificate has expired" in engine.log()
    assert "no TLS handshake: certificate is not yet valid" in engine.log()
    service = await start_service(pool=msgspec.structs.replace(pool, **good))
    assert (await service.post(TEXT, {"prompt": "hi"}))[0] == 200
