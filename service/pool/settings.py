"""What an operator can set about the pool: sections of the settings tree."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Seconds = Annotated[float, Meta(gt=0.0)]
PositiveInt = Annotated[int, Meta(ge=1)]


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which engines serve, how requests are spread over them, and what they share."""

    engines: Annotated[
        int,
        Meta(
            ge=0,
            description="engines that this process starts, one per device; 0 uses only engines found in the store",
        ),
    ] = 1
    routing: Annotated[
        Literal["least_ttft", "prefix_only", "round_robin", "random"],
        Meta(description="which engine gets a request: the one with the lowest predicted TTFT, or a simpler rule"),
    ] = "least_ttft"
    store: Annotated[
        str,
        Meta(
            description='metadata store of engines, fronts and experiments: "memory" for one process, or redis://…',
            pattern=r"^(memory|(redis|rediss|unix)://.+)$",
        ),
    ] = "memory"
    namespace: Annotated[
        str, Meta(description="namespace within the store: fronts use the engines of their own", pattern=r"^[\w.:-]+$")
    ] = "forerun"
    store_timeout: Annotated[
        Seconds, Meta(description="timeout of a request to the store, in seconds; the service then goes on without it")
    ] = 0.1
    silence_seconds: Annotated[
        Seconds,
        Meta(description="restart an engine that sends nothing for this many seconds; its heartbeat is one second"),
    ] = 5.0
    failover_seconds: Annotated[
        Seconds, Meta(description="seconds that a request whose engine crashed waits for failover to another")
    ] = 60.0
    failover_attempts: Annotated[
        PositiveInt,
        Meta(description="maximum retries: after this many engines have crashed on the same request, it fails"),
    ] = 5
    warm_seconds: Annotated[
        float,
        Meta(
            ge=0.0,
            description="seconds for computing hot prefixes before a new engine serves; 0 turns it off",
        ),
    ] = 0.0
    warm_prefixes: Annotated[
        PositiveInt,
        Meta(description="maximum hot prefixes whose tokens are kept in the store, where warm_seconds is set"),
    ] = 32
    ray: Annotated[
        str | None,
        Meta(
            description='address of a Ray cluster that is to run the engines, or "auto"; needs store, and secret or TLS'
        ),
    ] = None
    ray_strategy: Annotated[
        Literal["spread", "pack"], Meta(description="how Ray places engines: over many nodes, or on as few as possible")
    ] = "spread"
    ray_keep: Annotated[
        bool, Meta(description="leave the engines in the Ray cluster when this front ends; the next one finds them")
    ] = False
    secret: Annotated[
        str | None,
        Meta(
            description="shared secret of fronts and stand-alone engines; set a variable, not a flag, which all can see"
        ),
    ] = None
    tls_cert: Annotated[
        str | None,
        Meta(
            description="certificate file (PEM) of this side, between fronts and stand-alone engines; HTTPS for "
            "clients is --server-cert"
        ),
    ] = None
    tls_key: Annotated[str | None, Meta(description="private key file (PEM) of --tls-cert")] = None
    tls_ca: Annotated[
        str | None, Meta(description="CA certificates (PEM) that must have signed the other side's certificate")
    ] = None


class ListenerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a stand-alone engine (`forerun engine`) is reached."""

    listen: Annotated[str, Meta(description="HOST:PORT a stand-alone engine listens on; port 0 takes a free one")] = (
        "127.0.0.1:0"
    )
    advertise: Annotated[
        str | None,
        Meta(description="HOST[:PORT] that fronts connect to; unset, the address of --listen, or this machine's name"),
    ] = None


class TenantSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who asks, where several do who must not learn of each other."""

    tenant_header: Annotated[
        str | None,
        Meta(description="header in which a trusted proxy names the tenant; cached prompts are then shared within one"),
    ] = None
    operator_header: Annotated[
        str | None,
        Meta(
            description='header that a trusted proxy sets to "true" for operators, and removes from what clients send; '
            "without it and without keys, whoever needs no tenant header is an operator"
        ),
    ] = None
    api_keys_file: Annotated[
        str | None,
        Meta(description="file of keys, `NAME KEY` or `NAME KEY operator` a line; requests then need one of them"),
    ] = None
