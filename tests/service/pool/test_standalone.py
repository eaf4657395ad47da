"""Engines of their own over TCP, found in a real Redis: failover, departures, strangers and garbage."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cache_store.redis_store import RedisStore
from service.pool.handshake import PROTOCOL, HandshakeError, Hello, Welcome, join
from service.pool.settings import PoolSettings
from speculation.framing import FrameReader, encode_frame
from speculation.messages import Event, Ready, StepOutputs, Submit
from tests.redis_server import RedisServer
from tests.service.conftest import Service, StartService
from tests.service.pool.conftest import submit
from tests.service.pool.standalone import Standalone
from tests.service.pool.test_failover import TEXT, ask, body

SECRET = "correct horse"
StartEngine = Callable[..., Awaitable[Standalone]]
StartFront = Callable[..., Awaitable[Service]]


@pytest.fixture
def pool(shared_redis: RedisServer) -> PoolSettings:
    """The settings of a front without engines, in a namespace of its own."""
    return PoolSettings(
        engines=0,
        store=shared_redis.url,
        namespace=secrets.token_hex(8),
        store_timeout=2.0,
        silence_seconds=1.5,
        secret=SECRET,
    )


@pytest.fixture
async def start_engine(model_folder: Path, tmp_path: Path, pool: PoolSettings) -> AsyncIterator[StartEngine]:
    """Starts stand-alone engines; what is left of them at the end is killed."""
    engines: list[Standalone] = []

    async def start(*flags: str, **options: Any) -> Standalone:
        settings = ["--store", pool.store, "--namespace", pool.namespace, "--store-timeout", "2"]
        settings += ["--max-model-len", "10000"]
        environment = {"FORERUN_SECRET": SECRET, **options.pop("environment", {})}
        log = tmp_path / f"engine-{len(engines)}.log"
        engine = await Standalone.start(model_folder, log, *settings, *flags, environment=environment, **options)
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        await engine.stop()


def num_serving(service: Service) -> int:
    return len(service.front.client.serving)


async def test_fronts_find_engines_and_streams_outlive_them(
    start_service: StartService, start_engine: StartEngine, pool: PoolSettings
) -> None:
    """A front without engines serves with those it finds; when the one that serves a stream is gone another goes on."""
    engines = [await start_engine(), await start_engine()]
    service = await start_service(pool=pool)
    await service.until(lambda: num_serving(service) == 2)
    undisturbed = await ask(service, body(1))
    for victim in (signal.SIGKILL, signal.SIGSTOP):
        asking = asyncio.create_task(ask(service, body(1)))
        await service.until(lambda: service.front.client.num_live == 1)
        await asyncio.sleep(0.3)
        (busy,) = [member for member in service.front.client.members.values() if member.flights]
        engine = next(each for each in engines if busy.address.endswith(f":{each.port}"))
        engine.send(victim)
        assert await asking == undisturbed
        await service.until(lambda: num_serving(service) == 1)
        engines.append(await start_engine())
        await service.until(lambda: num_serving(service) == 2)
    await service.until(lambda: len(service.front.client.members) == 2)
    await service.until_idle()


async def test_what_engines_elsewhere_hold_is_told(
    start_service: StartService, start_engine: StartEngine, pool: PoolSettings
) -> None:
    """/v1/cache and /v1/engines say of an engine that was found in the store how many blocks it holds."""
    await start_engine()
    service = await start_service(pool=pool)
    assert (await service.post(TEXT, {"prompt": list(range(3, 83)), "max_tokens": 2}))[0] == 200
    async with asyncio.timeout(30):
        while [each["blocks_held"] for each in (await service.get("/v1/cache"))[1]["engines"]] != [5]:
            await asyncio.sleep(0.05)
    (engine,) = (await service.get("/v1/engines"))[1]["data"]
    assert (engine["blocks_held"], engine["address"][:16]) == (5, "tcp://127.0.0.1:")


async def test_an_engine_that_joins_is_warm(
    start_service: StartService, start_engine: StartEngine, pool: PoolSettings
) -> None:
    """What was asked of the pool before is in an engine that comes later when it serves: nobody has asked it yet."""
    first = await start_engine("--warm-seconds", "60")
    service = await start_service(pool=msgspec.structs.replace(pool, warm_seconds=60.0))
    shared = list(range(3, 83))
    for number in range(3):
        assert (await service.post(TEXT, {"prompt": [*shared, number], "max_tokens": 2}))[0] == 200
    await service.front.popularity.flush()
    assert await first.stop(signal.SIGTERM) == 0
    second = await start_engine("--warm-seconds", "60")
    assert '"prefixes": 1' in second.log()
    await service.until(lambda: num_serving(service) == 1)
    async with asyncio.timeout(30):
        while [each["blocks_held"] for each in (await service.get("/v1/cache"))[1]["engines"]] != [5]:
            await asyncio.sleep(0.05)


async def test_a_worker_that_dies_is_restarted_beside_the_stream(
    start_service: StartService, start_engine: StartEngine, pool: PoolSettings
) -> None:
    """When only the model's process is killed its fronts know at once, and serve with it again when it is back."""
    engine = await start_engine()
    service = await start_service(pool=pool)
    undisturbed = await ask(service, body(3))
    asking = asyncio.create_task(ask(service, body(3)))
    await service.until(lambda: service.front.client.num_live == 1)
    await asyncio.sleep(0.3)
    os.kill(engine.worker_pid, signal.SIGKILL)
    assert await asking == undisturbed


async def test_a_front_that_is_killed_leaves_nothing_running(
    start_service: StartService, start_engine: StartEngine, pool: PoolSettings, model_folder: Path
) -> None:
    """Its requests are aborted and their blocks free, while another front's request on the same engine goes on."""
    await start_engine()
    service = await start_service(pool=pool)
    other = await start_front(pool, model_folder)
    await service.until(lambda: num_running(service) == 4)
    asking = asyncio.create_task(ask(service, body(4, max_tokens=220)))
    await service.until(lambda: num_running(service) == 5)
    other.kill()
    await other.wait()
    await service.until(lambda: num_running(service) == 1)
    assert (await asking)["usage"][1] == 220
    await service.until_idle()


def num_running(service: Service) -> int:
    stats = service.front.metrics.engine.stats
    return stats.num_running if stats is not None else 0


async def start_front(pool: PoolSettings, folder: Path) -> asyncio.subprocess.Process:
    """A front in a process of its own, with four long requests."""
    code = f"""
import asyncio, msgspec
from service.app import create_app
from service.context import FRONT
from service.pool.settings import PoolSettings
from service.server import create_runner
from service.settings import Settings
from speculation.messages import SamplingParams, Submit

async def main():
    pool = msgspec.json.decode({msgspec.json.encode(pool)!r}, type=PoolSettings)
    app = create_app(Settings(pool=pool))
    await create_runner(app).setup()
    await app[FRONT].became_ready.wait()
    sampling = SamplingParams(max_tokens=100_000, ignore_eos=True)
    submits = [
        Submit(request_id=str(i), prompt_token_ids=[5, 6], sampling=sampling, cache_salt="slow") for i in range(4)
    ]
    async with app[FRONT].client.submit(submits) as stream:
        while True:
            await stream.take()

asyncio.run(main())
"""
    return await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.DEVNULL)


async def test_draining_over_the_network(
    start_service: StartService, start_engine: StartEngine, pool: PoolSettings
) -> None:
    """A drained engine ends what it has for every front, takes no more from any, and exits with 0."""
    engine = await start_engine()
    first, second = await start_service(pool=pool), await start_service(pool=pool)
    wanted = await ask(first, body(5))
    asking = [asyncio.create_task(ask(service, body(5))) for service in (first, second)]
    await first.until(lambda: num_running(first) == 2)
    (member,) = first.front.client.members.values()
    assert (await first.post(f"/v1/engines/{member.engine_id}/drain", {}))[0] == 202
    await second.until(lambda: not second.front.is_ready)
    assert (await second.post(TEXT, {"prompt": "hi"}))[0] == 503
    assert await asyncio.gather(*asking) == [wanted, wanted]
    async with asyncio.timeout(20):
        assert await engine.process.wait() == 0


async def test_a_termination_drains(start_service: StartService, start_engine: StartEngine, pool: PoolSettings) -> None:
    """On SIGTERM an engine finishes what it has, exits with 0 and is out of the store at once."""
    engine = await start_engine()
    service = await start_service(pool=pool)
    asking = asyncio.create_task(ask(service, body(6)))
    await service.until(lambda: num_running(service) == 1)
    engine.send(signal.SIGTERM)
    assert (await asking)["usage"][1] == 186
    async with asyncio.timeout(20):
        assert await engine.process.wait() == 0
    store = RedisStore(pool.store, namespace=pool.namespace, timeout_seconds=2.0)
    assert await store.engines() == []
    await store.close()


async def test_engines_of_different_models_are_never_mixed(
    start_service: StartService, start_engine: StartEngine, pool: PoolSettings
) -> None:
    """In one namespace, a front serves with engines of one model, whatever else is announced there, and says so."""
    await start_engine(fingerprint="a")
    service = await start_service(pool=pool)
    await start_engine(fingerprint="b")
    await start_engine(fingerprint="a")
    await service.until(lambda: num_serving(service) == 2)
    await asyncio.sleep(2.5)
    assert {member.ready and member.ready.model_fingerprint for member in service.front.client.serving} == {"a"}
    assert len(service.front.client.members) == 2


async def test_an_engine_that_lies_about_its_model_is_not_used(
    start_service: StartService, start_engine: StartEngine, pool: PoolSettings
) -> None:
    """What counts is what the engine itself says when it is connected, not what the store says of it."""
    await start_engine(fingerprint="a")
    service = await start_service(pool=pool)
    liar = await start_engine(fingerprint="b")
    store = RedisStore(pool.store, namespace=pool.namespace, timeout_seconds=2.0)
    for _ in range(30):
        for status in await store.engines():
            if status.address.endswith(f":{liar.port}"):
                claim = msgspec.structs.replace(status, engine_id="liar", model_fingerprint="a")
                await store.announce(claim)
        await asyncio.sleep(0.1)
    await store.close()
    assert "liar" in service.front.client.members
    assert {member.ready and member.ready.model_fingerprint for member in service.front.client.serving} == {"a"}


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


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--listen", "0.0.0.0:0"], "which others can reach: set secret (FORERUN_SECRET)"),
        (["--listen", "nowhere"], "listen is 'nowhere'; it must be HOST:PORT"),
        (["--listen", "127.0.0.1:99999"], "it must be HOST:PORT"),
        (["--store", "memory"], "store is memory; a stand-alone engine is found through a store"),
        (["--tls-cert", "x.pem"], "tls_key, tls_ca missing"),
    ],
)
async def test_an_engine_that_cannot_be_served_safely_does_not_start(
    start_engine: StartEngine, flags: list[str], says: str
) -> None:
    """The reason names the setting and what is right; the exit status is 1."""
    engine = await start_engine(*flags, environment={"FORERUN_SECRET": ""}, wait=False)
    async with asyncio.timeout(30):
        assert await engine.process.wait() == 1
    assert says in engine.log().replace('\\"', '"')


async def test_a_port_that_is_taken_is_told(start_engine: StartEngine) -> None:
    """Two engines cannot have one port: the second says so and exits with 1."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        engine = await start_engine("--listen", f"127.0.0.1:{taken.getsockname()[1]}", wait=False)
        async with asyncio.timeout(30):
            assert await engine.process.wait() == 1
    assert "cannot listen" in engine.log()


async def test_clocks_that_disagree_change_nothing(
    start_service: StartService, start_engine: StartEngine, pool: PoolSettings
) -> None:
    """An engine whose clock is a day ahead is found, used, and forgotten within seconds of its death like any other."""
    code = "import sys, time, runpy; now = time.time; time.time = lambda: now() + 86400; "
    code += "sys.argv = sys.argv[3:]; runpy.run_module(sys.argv[0], run_name='__main__')"
    engine = await start_engine(prefix=(sys.executable, "-c", code))
    service = await start_service(pool=pool)
    assert (await service.post(TEXT, {"prompt": "hi"}))[0] == 200
    await engine.stop()
    await service.until(lambda: not service.front.client.members)


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


async def test_ready_is_said_to_each_front(start_engine: StartEngine) -> None:
    """A front that connects is told first what it is connected to."""
    engine = await start_engine(fingerprint="mine")
    reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
    await join(reader, writer, SECRET)
    event = next(iter(FrameReader[Event](Event).feed(await reader.read(1 << 16))))
    assert isinstance(event, Ready)
    assert event.model_fingerprint == "mine"
    writer.close()
