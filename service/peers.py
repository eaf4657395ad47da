"""Who is at the other end of a request: the client itself, or a trusted proxy that says for whom it asks."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

import msgspec
from aiohttp import web

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
        for hop in reversed([hop.strip() for hop in hops]):
            if not _is_address(hop):
                break
            address = hop
            if not self._trusts(hop):
                break
        return Peer(address, forwarded or host)

    def _trusts(self, address: str) -> bool:
        if not _is_address(address):
            return False
        found = ipaddress.ip_address(address)
        if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
            found = found.ipv4_mapped
        return any(found in network for network in self._networks)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
