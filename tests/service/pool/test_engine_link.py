"""Silence on a connection to an engine, on real sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import msgspec
import pytest

from service.engine_link import EngineDiedError, EngineLink
from speculation.framing import encode_frame
from speculation.messages import Alive, Event
from tests.service.pool.conftest import READY

SILENCE = 0.5


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[EngineLink, asyncio.StreamWriter]]:
    """A link, and the engine's end of it."""
    accepted: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()
    server = await asyncio.start_server(lambda _, writer: accepted.set_result(writer), "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        engine = await accepted
        yield EngineLink(reader, writer), engine
        for end in (writer, engine):
            end.transport.abort()


async def collect(link: EngineLink, into: list[Event]) -> str:
    """Everything that comes; how it ended."""
    try:
        async with aclosing(link.events(SILENCE)) as events:
            async for event in events:
                into.append(event)  # noqa: PERF401 - what came before the end counts
    except EngineDiedError as died:
        return str(died)
    raise AssertionError("it ended without a reason")


async def test_silence_is_an_end_where_a_heartbeat_was_promised() -> None:
    """After Ready with a heartbeat, nothing for a while is a dead engine; before it, loading may take its time."""
    async with connected() as (link, engine):
        events: list[Event] = []
        listening = asyncio.create_task(collect(link, events))
        await asyncio.sleep(3 * SILENCE)
        assert not listening.done()
        engine.write(encode_frame(msgspec.structs.replace(READY, heartbeat_seconds=0.1)))
        for _ in range(6):
            await asyncio.sleep(SILENCE / 2)
            engine.write(encode_frame(Alive()))
        assert not listening.done()
        async with asyncio.timeout(20):
            assert await listening == "the engine said nothing for 0.5 s"
        assert events[1:] == [Alive()] * 6


async def test_without_a_promise_silence_means_nothing() -> None:
    """An engine that promises no heartbeat may say nothing for as long as it likes."""
    async with connected() as (link, engine):
        listening = asyncio.create_task(collect(link, []))
        engine.write(encode_frame(READY))
        await asyncio.sleep(3 * SILENCE)
        assert not listening.done()
        engine.close()
        assert await listening == "the engine closed its connection"


async def test_a_front_that_was_stopped_blames_no_engine() -> None:
    """When this process itself did not run for a while, engines that spoke meanwhile are not dead."""
    async with connected() as (link, engine):
        events: list[Event] = []
        listening = asyncio.create_task(collect(link, events))
        engine.write(encode_frame(msgspec.structs.replace(READY, heartbeat_seconds=0.1)))
        await asyncio.sleep(SILENCE / 4)
        for _ in range(3):
            time.sleep(3 * SILENCE)  # noqa: ASYNC251 - the whole loop stands still
            engine.write(encode_frame(Alive()))
            await asyncio.sleep(SILENCE / 10)
        assert not listening.done()
        assert len(events) == 4
        listening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await listening
