"""Where a stand-alone engine is reached: HOST:PORT, as settings and the store say it."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass

from service.pool.settings import ListenerSettings

SCHEME = "tcp://"
_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:\[\]/]+)(?::(?P<port>\d{1,5}))?")
EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - compared


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, field: str, *, default_port: int | None = None) -> Address:
        """Raises ValueError that names `field`."""
        found = _ADDRESS.fullmatch(text.removeprefix(SCHEME))
        port = int(found["port"]) if found and found["port"] else default_port
        if found is None or port is None or port > 65535:
            raise ValueError(f"{field} is {text!r}; it must be HOST:PORT, such as 127.0.0.1:9000 or [::1]:9000")
        return cls(found["host"].strip("[]"), port)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{SCHEME}{host}:{self.port}"


def advertised(settings: ListenerSettings, bound: Address) -> Address:
    """What fronts are told, of an engine that listens on `bound`."""
    if settings.advertise is not None:
        return Address.parse(settings.advertise, "advertise", default_port=bound.port)
    return Address(socket.gethostname() if bound.host in EVERYWHERE else bound.host, bound.port)
