"""Who connects to a stand-alone engine: fronts that know its secret, those that do not, and whoever sends anything."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path

import msgspec
import pytest

from service.pool.handshake import PROTOCOL, HandshakeError, Hello, Welcome, join
from service.pool.settings import PoolSettings
from speculation.framing import FrameReader, encode_frame
from speculation.messages import Abort, Event, Ready, StepOutputs, Submit
from tests.service.conftest import StartService
from tests.service.pool.conftest import submit
from tests.service.pool.standalone import SECRET, StartEngine, num_running
from tests.service.pool.test_failover import TEXT, ask, body


async def test_only_who_has_the_secret_is_served(
    start_service: StartService, start_engine: StartEngine, pool: PoolSettings
) -> None:
    """A front with another secret, or with none, is refused and says why; the engine serves on."""
    engine = await start_engine()
    for secret in ("wrong", None):
        reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
        with pytest.raises(HandshakeError, match="secrets differ"):
            await join(reader, writer, secret)
        writer.close()
    stranger = await start_service(pool=msgspec.structs.replace(pool, secret="wrong horse battery"), wait=False)
    await asyncio.sleep(2.0)
    assert not stranger.front.is_ready
    service = await start_service(pool=pool)
    assert (await service.post(TEXT, {"prompt": "hi"}))[0] == 200
    assert "a front with another secret" in engine.log()
    assert SECRET not in engine.log()


async def test_an_engine_without_the_secret_is_not_trusted(pool: PoolSettings) -> None:
    """A front sends no prompt to whoever stands at an announced address: the engine has to know the secret, too."""

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(encode_frame(Hello(PROTOCOL, b"n" * 32)))
        await reader.read(1000)
        writer.write(encode_frame(Welcome(b"m" * 32)))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(impostor, "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        with pytest.raises(HandshakeError, match="an engine with another secret"):
            await join(reader, writer, SECRET)
        writer.close()


async def test_certificates_on_both_sides(
    start_service: StartService, start_engine: StartEngine, pool: PoolSettings, tmp_path: Path
) -> None:
    """With mTLS an engine may listen without a secret; who has no certificate of the pool's CA is not served."""
    await make_certificates(tmp_path)
    files = {name: str(tmp_path / f"{name}.pem") for name in ("cert", "key", "ca")}
    flags = [word for name, path in files.items() for word in (f"--tls-{name}", path)]
    engine = await start_engine(
        "--listen", "0.0.0.0:0", "--advertise", "127.0.0.1", *flags, environment={"FORERUN_SECRET": ""}
    )
    tls = {f"tls_{name}": path for name, path in files.items()}
    service = await start_service(pool=msgspec.structs.replace(pool, secret=None, **tls))
    assert (await service.post(TEXT, {"prompt": "hi"}))[0] == 200
    plain = await start_service(pool=msgspec.structs.replace(pool, secret=None), wait=False)
    other = {f"tls_{name}": str(tmp_path / f"other-{name}.pem") for name in files}
    stranger = await start_service(pool=msgspec.structs.replace(pool, secret=None, **other), wait=False)
    await asyncio.sleep(2.5)
    assert not plain.front.is_ready
    assert not stranger.front.is_ready
    assert (await service.post(TEXT, {"prompt": "hi"}))[0] == 200
    assert engine.process.returncode is None


async def make_certificates(folder: Path) -> None:
    """Two CAs, each with one certificate that it signed."""
    for prefix in ("", "other-"):
        ca, ca_key, cert, key, request = (
            str(folder / f"{prefix}{name}.pem") for name in ("ca", "ca-key", "cert", "key", "request")
        )
        new = ["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        await openssl(*new, "-x509", "-days", "2", "-subj", "/CN=pool", "-keyout", ca_key, "-out", ca)
        await openssl(*new, "-subj", "/CN=member", "-keyout", key, "-out", request)
        await openssl(
            "x509", "-req", "-in", request, "-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-days", "2", "-out", cert
        )


async def openssl(*arguments: str) -> None:
    process = await asyncio.create_subprocess_exec(
        "openssl", *arguments, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    assert await process.wait() == 0


GARBAGE = {
    "noise": b"\xff\xfe\x00GET / HTTP/1.1\r\n" * 40,
    "a huge frame": struct.pack("<I", 2**31) + b"x" * 100,
    "a frame just over the limit": struct.pack("<I", 4097) + b"x" * 4097,
    "an empty frame": struct.pack("<I", 0),
    "a frame that never ends": struct.pack("<I", 4000) + b"x" * 10,
    "another message": encode_frame(submit("a")),
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
}


async def test_garbage_before_the_handshake_is_refused(
    start_service: StartService, start_engine: StartEngine, pool: PoolSettings
) -> None:
    """Whatever a stranger sends, his connection ends within seconds, and fronts are served as before."""
    engine = await start_engine()
    service = await start_service(pool=pool)
    asking = asyncio.create_task(ask(service, body(7, max_tokens=220)))

    async def send(data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
        writer.write(data)
        async with asyncio.timeout(15):
            try:
                answer = await reader.read()
            except ConnectionError:
                answer = b""
        writer.close()
        return answer

    answers = await asyncio.gather(*(send(data) for data in GARBAGE.values()))
    assert all(len(answer) < 100 for answer in answers)
    assert (await asking)["usage"][1] == 220


@pytest.mark.parametrize("data", [b"\xff" * 1000, struct.pack("<I", 65 * 1024**2), encode_frame(submit("x"))[:9]])
async def test_garbage_behind_the_handshake_ends_that_front_alone(
    start_service: StartService, start_engine: StartEngine, pool: PoolSettings, data: bytes
) -> None:
    """A front that loses step is cut off and what it had asked is aborted; the others notice nothing."""
    engine = await start_engine()
    service = await start_service(pool=pool)
    asking = asyncio.create_task(ask(service, body(8, max_tokens=220)))
    reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
    await join(reader, writer, SECRET)
    long = submit("mine", salt="slow", max_tokens=100_000, ignore_eos=True)
    writer.write(encode_frame(long))
    await service.until(lambda: num_running(service) == 2)
    writer.write(data)
    if len(data) < 20:
        writer.close()
    await service.until(lambda: num_running(service) == 1)
    assert (await asking)["usage"][1] == 220
    writer.close()


async def test_an_id_that_runs_already_ends_that_front_alone(
    start_service: StartService, start_engine: StartEngine, pool: PoolSettings
) -> None:
    """A front that submits a running id again is cut off, with a reason in the log, and its sequence is aborted."""
    engine = await start_engine()
    service = await start_service(pool=pool)
    asking = asyncio.create_task(ask(service, body(9, max_tokens=220)))
    reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
    await join(reader, writer, SECRET)
    long = submit("mine", salt="slow", max_tokens=100_000, ignore_eos=True)
    writer.write(encode_frame(Abort("nobody's")) + encode_frame(long))
    await service.until(lambda: num_running(service) == 2)
    writer.write(encode_frame(long))
    async with asyncio.timeout(20):
        while await reader.read(1 << 16):
            pass
    await service.until(lambda: num_running(service) == 1)
    assert (await asking)["usage"][1] == 220
    assert "it submitted 'mine', which runs already" in engine.log()
    writer.close()


async def test_fronts_do_not_see_each_other(start_engine: StartEngine) -> None:
    """The same request id on two connections is two sequences, and each front gets its own outputs alone."""
    engine = await start_engine()

    async def run(token_id: int) -> list[int]:
        reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
        await join(reader, writer, SECRET)
        writer.write(encode_frame(submit("same", prompt=[token_id], max_tokens=30, ignore_eos=True, salt="slow")))
        frames = FrameReader[Event](Event)
        tokens: list[int] = []
        while True:
            for event in frames.feed(await reader.read(1 << 16)):
                if isinstance(event, StepOutputs):
                    assert [output.request_id for output in event.outputs] == ["same"]
                    tokens += event.outputs[0].token_ids
                    if event.outputs[0].finish_reason is not None:
                        writer.close()
                        return tokens
                assert not isinstance(event, Submit)

    assert list(await asyncio.gather(run(7), run(9))) == [[7] * 30, [9] * 30]


async def test_ready_is_said_to_each_front(start_engine: StartEngine) -> None:
    """A front that connects is told first what it is connected to."""
    engine = await start_engine(fingerprint="mine")
    reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
    await join(reader, writer, SECRET)
    event = next(iter(FrameReader[Event](Event).feed(await reader.read(1 << 16))))
    assert isinstance(event, Ready)
    assert event.model_fingerprint == "mine"
    writer.close()
