"""Where engines run, and where they are reached."""

from __future__ import annotations

import os
import socket

import pytest

from service.pool.address import Address, advertised
from service.pool.devices import count_cuda_devices, place_engines
from service.pool.security import Security, is_loopback
from service.pool.settings import ListenerSettings, PoolSettings


def test_each_engine_gets_a_device_of_its_own() -> None:
    """With CUDA devices there is one each; a single engine is left to choose; none is none."""
    assert [place.device for place in place_engines("auto", 3, num_cuda=4)] == ["cuda:0", "cuda:1", "cuda:2"]
    assert [place.device for place in place_engines("cuda", 2, num_cuda=2)] == ["cuda:0", "cuda:1"]
    assert [place.device for place in place_engines("auto", 1, num_cuda=4)] == ["auto"]
    assert place_engines("auto", 0, num_cuda=4) == []


def test_engines_on_a_cpu_share_its_cores() -> None:
    """Every core belongs to one engine while they last; with more engines than cores each has one."""
    cores = sorted(os.sched_getaffinity(0))
    shares = [place.cores or () for place in place_engines("cpu", len(cores), num_cuda=8)]
    assert sorted(core for share in shares for core in share) == cores or len(cores) == 1
    many = [place.cores for place in place_engines("auto", len(cores) + 3, num_cuda=0)]
    assert all(share is not None and len(share) == 1 for share in many)


@pytest.mark.parametrize(
    ("device", "num_cuda", "says"), [("cuda", 1, "there are 1 CUDA"), ("cuda:0", 4, "say device cuda")]
)
def test_too_few_devices_are_told(device: str, num_cuda: int, says: str) -> None:
    """Two engines never share a device in silence: the error names both settings."""
    with pytest.raises(ValueError, match=says):
        place_engines(device, 2, num_cuda=num_cuda)


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("-1", 0), ("0,2", 2), ("GPU-a", 1)])
def test_visible_devices_count(monkeypatch: pytest.MonkeyPatch, visible: str, count: int) -> None:
    """Devices that are hidden from this process are hidden from its engines."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_cuda_devices() == count


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:9000", "127.0.0.1", 9000), ("[::1]:9000", "::1", 9000), ("tcp://engine-a:1", "engine-a", 1)],
)
def test_addresses_are_read_and_written(text: str, host: str, port: int) -> None:
    """What is written is read again as the same."""
    address = Address.parse(text, "listen")
    assert (address.host, address.port) == (host, port)
    assert Address.parse(str(address), "address") == address


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:99999", "a b:1", "host:1/x", "::1:9000"])
def test_what_is_no_address_is_told(text: str) -> None:
    """The error names the setting, what it is, and what is right."""
    with pytest.raises(ValueError, match=r"listen is .* it must be HOST:PORT"):
        Address.parse(text, "listen")


def test_an_engine_is_advertised_where_it_can_be_reached() -> None:
    """Under what the operator says, else under what it listens on, else under this machine's name."""
    everywhere = Address.parse("0.0.0.0:9000", "listen")
    assert advertised(ListenerSettings(), everywhere) == Address(socket.gethostname(), 9000)
    assert advertised(ListenerSettings(), Address("10.0.0.7", 1)) == Address("10.0.0.7", 1)
    assert advertised(ListenerSettings(advertise="gpu-3"), everywhere) == Address("gpu-3", 9000)
    assert advertised(ListenerSettings(advertise="gpu-3:7"), everywhere) == Address("gpu-3", 7)


@pytest.mark.parametrize(
    ("host", "safe"), [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False)]
)
def test_loopback_is_known(host: str, safe: bool) -> None:
    """Only addresses that no other machine reaches do without a secret."""
    assert is_loopback(host) is safe
    assert not is_loopback("engine-a")


def test_a_short_secret_is_none() -> None:
    """A secret that could be guessed is refused, and an empty one protects nothing."""
    with pytest.raises(ValueError, match="secret has 5 characters; it must have at least 12"):
        Security.load(PoolSettings(secret="12345"))
    with pytest.raises(ValueError, match="which others can reach"):
        Security.load(PoolSettings(secret="")).check_listener("0.0.0.0")
    Security.load(PoolSettings(secret="long enough now")).check_listener("0.0.0.0")


def test_certificates_that_are_not_there_are_told() -> None:
    """All three files are needed, and must be readable."""
    with pytest.raises(ValueError, match="tls_key missing"):
        Security.load(PoolSettings(tls_cert="a.pem", tls_ca="b.pem"))
    with pytest.raises(ValueError, match="cannot be used"):
        Security.load(PoolSettings(tls_cert="a.pem", tls_key="b.pem", tls_ca="c.pem"))
