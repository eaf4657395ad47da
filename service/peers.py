"""Who is at the other end of a request: the client itself, or a trusted proxy that says for whom it asks."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

import msgspec
from aiohttp import web

_ENTRY = re.compile(r"\[(?P<bracketed>[0-9A-Fa-f:.]+)\](:\d+)?|(?P<dotted>[0-9.]+)(:\d+)?|(?P<plain>[0-9A-Fa-f:.]+)")
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Peer(msgspec.Struct, frozen=True):
    """The client of a request, as far as it is known."""

    address: str
    """Its IP address; empty where it cannot be known."""
    host: str
    """The host, and port if any, under which it reached the service or the proxy."""


PEER = web.RequestKey("peer", Peer)


class TrustedProxies:
    """Tells clients apart behind proxies whose `X-Forwarded-For` and `X-Forwarded-Host` are believed."""

    def __init__(self, networks: Sequence[str]) -> None:
        """`networks` are addresses, or networks as 10.0.0.0/8. Raises ValueError for anything else."""
        self._networks: list[Network] = []
        for text in networks:
            try:
                self._networks.append(ipaddress.ip_network(text, strict=False))
            except ValueError:
                raise ValueError(
                    f"trusted_proxies has {text!r}; each must be an IP address or a network such as 10.0.0.0/8"
                ) from None

    def peer_of(self, request: web.BaseRequest) -> Peer:
        """The client: whoever is connected, or of a trusted proxy whom it names.

        Of several addresses in `X-Forwarded-For` it is the last that is no trusted proxy: whatever stands before it
        was sent by that client, which may have made it up.
        """
        address, host = request.remote or "", request.headers.get("Host", request.host)
        if not self._networks or not self._trusts(address):
            return Peer(address, host)
        forwarded = ",".join(request.headers.getall("X-Forwarded-Host", ())).rpartition(",")[2].strip()
        hops = ",".join(request.headers.getall("X-Forwarded-For", ())).split(",")
        for hop in map(_address_of, reversed(hops)):
            if hop is None:
                break
            address = hop
            if not self._trusts(hop):
                break
        return Peer(address, forwarded or host)

    def _trusts(self, address: str) -> bool:
        plain = _address_of(address)
        return plain is not None and any(ipaddress.ip_address(plain) in network for network in self._networks)


def _address_of(text: str) -> str | None:
    """The address of an entry such as `203.0.113.9`, `203.0.113.9:4711` or `[2001:db8::1]:443`; None for no address.

    An IPv4 address that is written as an IPv6 one is the IPv4 address. Scopes (`%eth0`) are no part of a header.
    """
    found = _ENTRY.fullmatch(text.strip())
    if found is None:
        return None
    try:
        address = ipaddress.ip_address(found["bracketed"] or found["dotted"] or found["plain"])
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
