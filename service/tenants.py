"""Who asks, where several do who must not learn of each other: API keys, or a header that a trusted proxy sets."""

from __future__ import annotations

import base64
import hashlib
import re
import struct
from collections.abc import Mapping
from pathlib import Path

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from service.errors import ApiError
from service.pool.settings import TenantSettings

_NAME = re.compile(r"[\x21-\x7e]{1,256}")
_SALT = hashlib.blake2b(digest_size=16, person=b"forerun tenant 1")
OPERATOR = "operator"
KEY_PROTOCOL = "forerun.key."
"""A page cannot set headers of a WebSocket. It offers a subprotocol of this beginning, then the key in base64url."""


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """Whose request this is."""

    name: str
    """Empty where the service knows no tenants."""
    is_operator: bool
    """Whether it may see and change what concerns all."""


EVERYBODY = Tenant(name="", is_operator=True)


class Tenants:
    """Tells tenants apart, and gives each a salt of its own, so that cached prompts are shared within one alone.

    Without keys and header there are none: everybody is an operator, and a request's `cache_salt` stands as it is.
    """

    def __init__(self, header: str | None = None, keys: Mapping[str, Tenant] | None = None) -> None:
        """`keys` maps the digest of each key to whose it is."""
        self._header = header
        self._keys = keys

    @classmethod
    def load(cls, settings: TenantSettings) -> Tenants:
        """Raises ValueError, naming file and line, for a key file that cannot be used."""
        if settings.api_keys_file is None:
            return cls(settings.tenant_header)
        path = Path(settings.api_keys_file).expanduser()
        try:
            lines = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"api_keys_file {path}: {error}") from error
        keys: dict[str, Tenant] = {}
        for number, line in enumerate(lines, start=1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) not in {2, 3} or words[2:] not in ([], [OPERATOR]):
                raise ValueError(f"api_keys_file {path}, line {number}: it must be NAME KEY or NAME KEY {OPERATOR}")
            digest = _digest(words[1])
            if digest in keys:
                raise ValueError(f"api_keys_file {path}, line {number}: the key is there twice")
            keys[digest] = Tenant(name=words[0], is_operator=len(words) == 3)
        if not keys:
            raise ValueError(f"api_keys_file {path} has no keys: nobody could ask anything")
        return cls(settings.tenant_header, keys)

    def identify(self, headers: Mapping[str, str]) -> Tenant:
        """Whose request has these headers. Raises `ApiError` (401) for a key that is missing or wrong."""
        tenant = EVERYBODY if self._keys is None else self._owner(headers)
        if self._header is None or self._header not in headers:
            return tenant
        name = headers[self._header]
        if not _NAME.fullmatch(name):
            raise ApiError.invalid(self._header, f"{self._header} must be 1 to 256 visible ASCII characters")
        return Tenant(name=f"{tenant.name}/{name}" if tenant.name else name, is_operator=False)

    def author(self, headers: Mapping[str, str]) -> Tenant:
        """Whose generation this is to be. Raises `ApiError` (401) also where the proxy did not say."""
        tenant = self.identify(headers)
        if self._header is not None and self._header not in headers:
            raise ApiError(
                401, f"the header {self._header} must name the tenant", param=self._header, code="tenant_required"
            )
        return tenant

    def salt(self, tenant: Tenant, wanted: str) -> str:
        """The salt of a tenant's blocks. What the request wants divides them further, and never leads to another's."""
        if not tenant.name:
            return wanted
        state = _SALT.copy()
        for text in (tenant.name, wanted):
            field = text.encode("utf-8", "surrogatepass")
            state.update(struct.pack("<Q", len(field)) + field)
        return f"tenant {state.hexdigest()}"

    def _owner(self, headers: Mapping[str, str]) -> Tenant:
        kind, _, key = headers.get("Authorization", "").partition(" ")
        key = key if kind.lower() == "bearer" else _offered_key(headers.get("Sec-WebSocket-Protocol", ""))
        tenant = (self._keys or {}).get(_digest(key.strip()))
        if tenant is None:
            message = "the API key is wrong or missing; send it as Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return tenant


TENANTS = web.AppKey("tenants", Tenants)
GENERATING = ("/v1/chat/completions", "/v1/completions")
READABLE = ("/v1/stream", "/v1/models", "/v1/speculation")
"""What tenants may do, beside generating; all else under /v1/ is for operators. What probes and Prometheus ask is not
under it, and needs no key."""


@web.middleware
async def only_who_may(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let nobody in without a key where keys are set, and only operators to what concerns all."""
    path = request.path
    if path.startswith("/v1/"):
        tenant = request.app[TENANTS].identify(request.headers)
        is_reading = request.method in {"GET", "HEAD"} and path.startswith(READABLE)
        if not (is_reading or path in GENERATING or tenant.is_operator):
            raise ApiError(403, f"{request.method} {path} is for operators", code="operators_only")
    return await handler(request)


def _offered_key(protocols: str) -> str:
    """The key among the subprotocols that a WebSocket's client offers; empty if there is none."""
    for protocol in protocols.split(","):
        if (name := protocol.strip()).startswith(KEY_PROTOCOL):
            encoded = name.removeprefix(KEY_PROTOCOL)
            try:
                return base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode()
            except ValueError:
                return ""
    return ""


def _digest(key: str) -> str:
    """Keys are compared by their digests: how long that takes tells nothing of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
