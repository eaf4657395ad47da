"""One engine alone, for all fronts that find it: the process around it that listens, passes on and cleans up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import structlog

from service.engine_client import EngineUnavailableError
from service.engine_link import READ_BYTES
from service.pool.handshake import DepartedError, HandshakeError, admit
from service.pool.member import Member
from speculation.framing import FrameReader, FramingError, encode_frame
from speculation.messages import (
    Abort,
    Alive,
    Command,
    Drain,
    Event,
    Prefer,
    Ready,
    Rejected,
    SequenceOutput,
    Stats,
    StepOutputs,
    Submit,
)

MAX_UNSENT_BYTES = 64 * 1024 * 1024
"""A front that leaves so much unread is as good as dead."""


class ProtocolError(Exception):
    """A front said something that is a command, but not one that may come now."""


class FrontConnection:
    """One connected front and its sequences."""

    def __init__(self, name: str, writer: asyncio.StreamWriter) -> None:
        self.name = name
        self.live: set[str] = set()
        """Ids, as the engine knows them, of what it has not ended."""
        self._writer = writer

    def send(self, event: Event) -> None:
        if self._writer.is_closing():
            return
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._writer.transport.abort()
        else:
            self._writer.write(encode_frame(event))

    def close(self) -> None:
        """Say what was said, and no more."""
        self._writer.close()


class Listener:
    """Satisfies `EngineSink`: what the engine says goes to the front it concerns, under the id that front gave.

    Fronts do not know of each other. When one leaves, what it had asked for is aborted, and its blocks are free; when
    the engine dies, every front's connection ends, and so they know.
    """

    def __init__(self, member: Member, secret: str | None) -> None:
        """`member` follows the engine for reports to the store and warm starts; no front's sequence passes it."""
        self._member = member
        self._secret = secret
        self._fronts: dict[str, FrontConnection] = {}
        self._num_accepted = 0
        self._send: Callable[[Command], None] | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._log = structlog.get_logger("forerun.listener")

    @property
    def is_draining(self) -> bool:
        return self._member.is_draining

    def attach(self, ready: Ready, send: Callable[[Command], None]) -> None:
        """The engine has loaded its model."""
        self._send = send
        self._member.attach(ready, send)

    def detach(self, error: EngineUnavailableError) -> None:
        """The engine is gone."""
        self._send = None
        for front in self._fronts.values():
            front.close()
        self._member.detach(error)

    def drain(self) -> None:
        """Take nothing more, and end when everything is done."""
        self._member.drain()

    def dispatch(self, event: Event) -> None:
        """Pass on what the engine says. An event that cannot be passed on is logged, and those behind it are."""
        self._member.dispatch(event)
        try:
            self._dispatch(event)
        except Exception:  # noqa: BLE001 - the engine and other fronts go on
            self._log.exception("an event of the engine could not be passed on", event_type=type(event).__name__)

    def _dispatch(self, event: Event) -> None:
        match event:
            case StepOutputs():
                self._pass_on(event)
            case Rejected():
                name, _, request_id = event.request_id.partition("/")
                if (front := self._fronts.get(name)) is not None:
                    front.live.discard(event.request_id)
                    front.send(msgspec.structs.replace(event, request_id=request_id))
            case Stats() | Alive():
                for front in self._fronts.values():
                    front.send(event)

    def _pass_on(self, event: StepOutputs) -> None:
        by_front: dict[str, list[SequenceOutput]] = {}
        for output in event.outputs:
            name, _, request_id = output.request_id.partition("/")
            front = self._fronts.get(name)
            if front is not None:
                if output.finish_reason is not None:
                    front.live.discard(output.request_id)
                by_front.setdefault(name, []).append(msgspec.structs.replace(output, request_id=request_id))
        for name, outputs in by_front.items():
            self._fronts[name].send(StepOutputs(outputs))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its handshake to its end."""
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        peer = str(writer.get_extra_info("peername"))
        self._num_accepted += 1
        front = FrontConnection(f"{self._num_accepted}", writer)
        try:
            await admit(reader, writer, self._secret)
            await self._member.opened.wait()
            if self._member.ready is not None:
                self._log.info("front connected", peer=peer)
                self._fronts[front.name] = front
                front.send(self._member.ready)
                await self._listen(front, reader)
        except DepartedError:
            self._log.debug("a connection without a word", peer=peer)
        except (HandshakeError, FramingError, ProtocolError) as error:
            self._log.warning("front refused", peer=peer, reason=str(error))
        except OSError as error:
            self._log.warning("front lost", peer=peer, reason=str(error))
        except Exception:  # noqa: BLE001 - the engine and other fronts go on
            self._log.exception("connection of a front ended by an error of the engine's service", peer=peer)
        finally:
            self._serving.discard(task)
            self._leave(front)
            writer.close()

    async def close(self) -> None:
        """End every connection."""
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _listen(self, front: FrontConnection, reader: asyncio.StreamReader) -> None:
        frames = FrameReader[Command](Command)
        while data := await reader.read(READ_BYTES):
            for command in frames.feed(data):
                self._handle(front, command)

    def _handle(self, front: FrontConnection, command: Command) -> None:
        if self._send is None:
            return
        match command:
            case Submit():
                request_id = f"{front.name}/{command.request_id}"
                if request_id in front.live:
                    raise ProtocolError(f"it submitted {command.request_id[:100]!a}, which runs already")
                self._send(msgspec.structs.replace(command, request_id=request_id))
                front.live.add(request_id)
            case Abort():
                self._send(Abort(f"{front.name}/{command.request_id}"))
            case Prefer():
                pass  # what the pool asks for is in the store, where this side reads it itself
            case Drain():
                self._log.info("draining", asked_by=front.name)
                self.drain()

    def _leave(self, front: FrontConnection) -> None:
        """A front is gone, and nobody waits for what it had asked."""
        self._fronts.pop(front.name, None)
        if self._send is not None:
            for request_id in front.live:
                self._send(Abort(request_id))
