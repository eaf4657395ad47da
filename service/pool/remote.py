"""The front's side of a stand-alone engine: connected, listened to, and connected again."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import structlog

from service.engine_client import EngineUnavailableError
from service.engine_link import READ_BYTES, EngineDiedError, EngineLink
from service.pool.address import Address
from service.pool.handshake import HANDSHAKE_SECONDS, HandshakeError, join
from service.pool.member import Member
from service.pool.security import Security, describe
from speculation.messages import Ready

FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 5.0


class RemoteEngine:
    """Keeps one engine connected for as long as `run` runs."""

    def __init__(
        self,
        member: Member,
        security: Security,
        *,
        on_ready: Callable[[Ready], Awaitable[None]],
        on_lost: Callable[[], None],
        silence_seconds: float,
        load_seconds: float,
    ) -> None:
        """`on_ready` raises ValueError for an engine whose model is not what is served here."""
        self._member = member
        self._address = Address.parse(member.address, "address")
        self._security = security
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._silence_seconds = silence_seconds
        self._load_seconds = load_seconds
        self._log = structlog.get_logger("forerun.pool").bind(engine=member.engine_id, address=str(self._address))

    async def run(self) -> None:
        """Connect, again and again, until cancelled."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                await self._live()
            except Exception as died:  # noqa: BLE001 - the connection is made again
                if not isinstance(died, EngineDiedError):
                    self._log.exception("the connection to an engine ended by an error of the service")
                served = self._member.ready is not None
                self._lose(EngineUnavailableError(f"the engine was lost ({died})", "engine_died"))
                pause = FIRST_PAUSE_SECONDS if served else min(2 * pause, LONGEST_PAUSE_SECONDS)
                self._log.warning("engine not connected", reason=str(died), retry_in_seconds=pause)
            except asyncio.CancelledError:
                self._member.detach(EngineUnavailableError("the engine is not used any more", "engine_died"))
                raise
            await asyncio.sleep(pause)

    async def _live(self) -> None:
        """One connection; always raises `EngineDiedError` in the end."""
        reader, writer = await self._connect()
        try:
            await join(reader, writer, self._security.secret)
            link = EngineLink(reader, writer)
            async with aclosing(link.events(self._silence_seconds)) as events:
                try:
                    async with asyncio.timeout(self._load_seconds):
                        ready = await anext(events)
                except TimeoutError:
                    raise EngineDiedError(f"it was not ready within {self._load_seconds:g} s") from None
                await self._accept(ready, link)
                async for event in events:
                    self._member.dispatch(event)
        except HandshakeError as error:
            silent = isinstance(error.__cause__, TimeoutError)
            raise EngineDiedError(f"{error}{self._certificate_hint(silent=silent)}") from error
        finally:
            writer.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            async with asyncio.timeout(2 * HANDSHAKE_SECONDS):
                return await asyncio.open_connection(
                    self._address.host, self._address.port, limit=READ_BYTES, ssl=self._security.client_tls
                )
        except ssl.SSLError as error:
            hint = f"its certificate is checked with tls_ca {self._security.ca}"
            raise EngineDiedError(f"no TLS handshake: {describe(error)}; {hint}") from error
        except (OSError, TimeoutError) as error:
            raise EngineDiedError(f"no connection: {describe(error)}{self._certificate_hint()}") from error

    def _certificate_hint(self, *, silent: bool = False) -> str:
        """What may be behind a refusal without words: in TLS 1.3 a certificate is refused after its owner is done."""
        if self._security.client_tls is None:
            return "; engines with certificates need tls_cert, tls_key and tls_ca here" if silent else ""
        return f"; if it refuses this front's certificate, see tls_cert {self._security.cert}"

    async def _accept(self, ready: object, link: EngineLink) -> None:
        if not isinstance(ready, Ready):
            raise EngineDiedError(f"it said {type(ready).__name__} before Ready")
        try:
            await self._on_ready(ready)
        except ValueError as error:
            raise EngineDiedError(str(error)) from error
        self._member.attach(ready, link.send)
        self._log.info("engine connected", description=ready.description, blocks=ready.num_blocks)

    def _lose(self, error: EngineUnavailableError) -> None:
        served = self._member.ready is not None
        self._member.detach(error)
        if served:
            self._on_lost()
