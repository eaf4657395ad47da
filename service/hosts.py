"""Names under which a service is reached: what a browser's `Host` and `Origin` headers may say.

A page of another site can have its reader's browser send requests to any address, this machine's own included. Two
checks keep such pages out, beside the browser's rule that no page reads what it may not:

    Host     A page may point its own name at this machine after it was loaded (DNS rebinding). Its requests are then of
             its own origin, and only `Host` still tells: it is the page's name. Without API keys, `Host` must be an
             address, `localhost` or an allowed name.
    Origin   A page under its own address says so in `Origin`, which must be the origin of the service itself.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

import msgspec

ANY = "*"
"""Among the allowed names: every name is."""
LOCALHOST = "localhost"
"""Browsers take it and all names below it for this machine without asking anybody."""
PORTS = {"http": 80, "https": 443}

_AUTHORITY = re.compile(r"(?P<name>\[[0-9a-fA-F:.]{2,45}\]|[^\s\[\]:/@\\?#,*]{1,253})(?::(?P<port>[0-9]{0,5}))?")
_ORIGIN = re.compile(r"(?P<scheme>https?)://(?P<authority>[^/]+)")


class Authority(msgspec.Struct, frozen=True):
    """Host name or address, and port, of a `Host` header or an origin."""

    name: str
    """In lower case, without a trailing dot and without the brackets of an IPv6 address."""
    port: int | None
    """None where none is written."""

    @classmethod
    def parse(cls, text: str) -> Authority | None:
        """None for what is no authority."""
        found = _AUTHORITY.fullmatch(text)
        if found is None:
            return None
        name = found["name"].lower().removesuffix(".")
        is_bracketed = name.startswith("[")
        if is_bracketed:
            name = name[1:-1]
        if not name or is_bracketed != (":" in name):
            return None
        return cls(name, int(found["port"]) if found["port"] else None)

    @property
    def is_address(self) -> bool:
        """Whether it is an IPv4 or IPv6 address, in the one spelling that browsers send."""
        return _is_address(self.name)


class AllowedHosts:
    """Decides whether a service may be reached under what a `Host` header says."""

    def __init__(self, names: Sequence[str]) -> None:
        """`names` are allowed beside addresses and `localhost`. Raises ValueError for one that no `Host` can match."""
        self._names: set[str] = set()
        for name in names:
            if _is_address(name):
                continue
            authority = Authority.parse(name)
            if name != ANY and (authority is None or authority.port is not None):
                raise ValueError(f"allowed_hosts has {name!r}; each must be a host's name without a port, or {ANY!r}")
            self._names.add(ANY if authority is None or name == ANY else authority.name)

    def allows(self, host: str) -> bool:
        """Whether a request with this `Host` is meant for the service. The port is not compared: it may be mapped."""
        if ANY in self._names or _is_address(host):
            return True
        authority = Authority.parse(host)
        if authority is None:
            return False
        name = authority.name
        return name in self._names or name == LOCALHOST or name.endswith(f".{LOCALHOST}") or authority.is_address


def is_own_origin(origin: str, host: str, forwarded_scheme: str | None) -> bool:
    """Whether a browser that sends this `Origin` and `Host` shows a page of the service itself.

    `forwarded_scheme` is what a proxy says in `X-Forwarded-Proto`; no page can set it. A proxy that ends TLS and does
    not say so passes https origins on to a service that speaks http: without the header both schemes are its own.
    """
    found = _ORIGIN.fullmatch(origin)
    if found is None:
        return False
    scheme = found["scheme"]
    if forwarded_scheme is not None and scheme != forwarded_scheme.rpartition(",")[2].strip().lower():
        return False
    page, service = Authority.parse(found["authority"]), Authority.parse(host)
    if page is None or service is None:
        return False
    port = PORTS[scheme]
    return page.name == service.name and (page.port or port) == (service.port or port)


def is_loopback(host: str) -> bool:
    """Whether a service that listens on this host is reached from its own machine alone."""
    name = host.lower().removesuffix(".").strip("[]")
    if name == LOCALHOST or name.endswith(f".{LOCALHOST}"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
