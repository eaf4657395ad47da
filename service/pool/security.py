"""What protects the connections between fronts and stand-alone engines."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass

import structlog

from service.pool.settings import PoolSettings

LEAST_SECRET = 12

_log = structlog.get_logger("forerun.pool")


@dataclass(frozen=True, slots=True)
class Security:
    """A shared secret, certificates on both sides, both, or neither."""

    secret: str | None = None
    server_tls: ssl.SSLContext | None = None
    client_tls: ssl.SSLContext | None = None
    cert: str | None = None
    """The file of the certificate that this side shows."""
    ca: str | None = None
    """The file of the CA that the other side's certificate must be of."""

    @classmethod
    def load(cls, settings: PoolSettings) -> Security:
        """An empty secret is none. Raises ValueError, naming the setting, for what cannot be used."""
        secret = settings.secret or None
        if secret is not None and len(secret) < LEAST_SECRET:
            raise ValueError(f"secret has {len(secret)} characters; it must have at least {LEAST_SECRET}")
        files = {"tls_cert": settings.tls_cert, "tls_key": settings.tls_key, "tls_ca": settings.tls_ca}
        missing = [name for name, path in files.items() if path is None]
        if len(missing) == len(files):
            return cls(secret)
        if missing:
            raise ValueError(f"{', '.join(missing)} missing: certificates need {', '.join(files)}, all three")
        try:
            server = _context(ssl.PROTOCOL_TLS_SERVER, settings)
            client = _context(ssl.PROTOCOL_TLS_CLIENT, settings)
        except (OSError, ssl.SSLError) as error:
            shown = ", ".join(f"{name} {path}" for name, path in files.items())
            raise ValueError(f"tls_cert, tls_key or tls_ca cannot be used: {error} ({shown})") from error
        reason = why_refused(server, client)
        if reason is not None:
            _log.warning(
                "others will refuse tls_cert", tls_cert=files["tls_cert"], tls_ca=files["tls_ca"], reason=reason
            )
        server.sslobject_class = _TellingServer
        return cls(secret, server, client, files["tls_cert"], files["tls_ca"])

    def check_listener(self, host: str) -> None:
        """Raises ValueError where anybody on the network could reach an engine that asks nobody who he is."""
        if self.secret is None and self.server_tls is None and not is_loopback(host):
            raise ValueError(
                f"listen is {host}, which others can reach: set secret (FORERUN_SECRET), or tls_cert, tls_key and "
                "tls_ca; or listen on 127.0.0.1"
            )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address. Names other than localhost may mean anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def why_refused(server: ssl.SSLContext, client: ssl.SSLContext) -> str | None:
    """Why this side's own certificate would be refused by its own CA: such as that it has expired. None if it is good.

    A handshake with itself, in memory.
    """
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    accepting = server.wrap_bio(to_server, to_client, server_side=True)
    connecting = client.wrap_bio(to_client, to_server)
    for side in (connecting, accepting, connecting):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLError as error:
            return describe(error)
    return None


def describe(error: Exception) -> str:
    """A failed handshake or connection in words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return str(error.verify_message)
    if isinstance(error, ssl.SSLError):
        if error.reason in {"WRONG_VERSION_NUMBER", "HTTP_REQUEST"}:
            return "the other side does not speak TLS"
        if error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
            return "the other side has no certificate"
    return str(error) or "no answer"


class _TellingServer(ssl.SSLObject):
    """An engine's end of a connection, which says why a handshake failed. Nobody else does: asyncio only closes."""

    def do_handshake(self) -> None:
        """See `ssl.SSLObject`."""
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            _log.warning("front refused", reason=f"no TLS handshake: {describe(error)}")
            raise


def _context(protocol: int, settings: PoolSettings) -> ssl.SSLContext:
    """Each side shows a certificate and demands one of the pool's own CA.

    Names are not compared: engines come and go under addresses that no certificate lists, and whoever has a
    certificate of this CA belongs to the pool.
    """
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(settings.tls_ca)
    context.load_cert_chain(str(settings.tls_cert), settings.tls_key)
    return context
