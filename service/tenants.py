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
from multidict import MultiMapping

from service.errors import ApiError
from service.pool.settings import TenantSettings

_NAME = re.compile(r"[\x21-\x2b\x2d-\x7e]{1,256}")
"""Visible ASCII without commas: proxies join several values of a header with commas."""
_SALT = hashlib.blake2b(digest_size=16, person=b"forerun tenant 2")
OPERATOR = "operator"
YES, NO = frozenset({"1", "true"}), frozenset({"0", "false", ""})
"""Values of the operators' header."""
KEY_PROTOCOL = "forerun.key."
"""A page cannot set headers of a WebSocket. It offers a subprotocol of this beginning, then the key in base64url."""


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """Whose request this is."""

    key: str = ""
    """Name of the API key; empty where the service has no keys."""
    member: str = ""
    """What the tenants' header says; empty where the service has no such header, or the request does not have it."""
    is_operator: bool
    """Whether it may see and change what concerns all."""

    @property
    def name(self) -> str:
        """Key and member in one, to be shown. Unique: where there are both, no key's name has a slash."""
        return f"{self.key}/{self.member}" if self.key and self.member else self.key or self.member


class Tenants:
    """Tells tenants apart, and gives each a salt of its own, so that cached prompts are shared within one alone.

    Who may do what, by what is set:

        nothing                    everybody is an operator, and a request's `cache_salt` stands as it is
        header                     tenants generate and read; a request without the header may nothing; nobody operates
        operator header            everybody generates and reads; requests that it marks are operators'
        header, operator header    tenants generate and read; requests that the second marks are operators'
        keys                       a key's owner generates and reads, an operator's key may all; others may nothing
        keys, header               the same; a request that names a tenant is no operator's
    """

    def __init__(
        self,
        header: str | None = None,
        keys: Mapping[str, Tenant] | None = None,
        operator_header: str | None = None,
    ) -> None:
        """`keys` maps the digest of each key to whose it is."""
        self._header = header
        self._keys = keys
        self._operator_header = operator_header

    @property
    def has_keys(self) -> bool:
        """Whether every request needs an API key."""
        return self._keys is not None

    @classmethod
    def load(cls, settings: TenantSettings) -> Tenants:
        """Raises ValueError, naming file and line, for a key file that cannot be used."""
        if settings.api_keys_file is None:
            return cls(settings.tenant_header, operator_header=settings.operator_header)
        if settings.operator_header is not None:
            # Whoever has a key and reaches the service could set the header.
            raise ValueError("operator_header is set beside api_keys_file; with keys, the file says who is an operator")
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
            if settings.tenant_header is not None and "/" in words[0]:
                reason = "beside tenant_header a name must have no '/', which stands between key and tenant"
                raise ValueError(f"api_keys_file {path}, line {number}: {reason}")
            digest = _digest(words[1])
            if digest in keys:
                raise ValueError(f"api_keys_file {path}, line {number}: the key is there twice")
            keys[digest] = Tenant(key=words[0], is_operator=len(words) == 3)
        if not keys:
            raise ValueError(f"api_keys_file {path} has no keys: nobody could ask anything")
        return cls(settings.tenant_header, keys)

    def identify(self, headers: Mapping[str, str]) -> Tenant:
        """Whose request has these headers.

        Raises `ApiError`: 401 for a key that is missing or wrong, or a request that nobody vouches for; 400 for a
        header that names no tenant, or more than one.
        """
        if self._keys is not None:
            owner = self._owner(headers)
            member = self._member(headers)
            return Tenant(key=owner.key, member=member, is_operator=owner.is_operator and not member)
        member = self._member(headers)
        if self._operator_header is not None:
            is_operator = self._is_marked(headers, self._operator_header)
        else:
            is_operator = self._header is None
        if self._header is not None and not member and not is_operator:
            raise self._nobody()
        return Tenant(member=member, is_operator=is_operator)

    def author(self, headers: Mapping[str, str]) -> Tenant:
        """Whose generation this is to be. Raises `ApiError` (401) also where the proxy did not say."""
        tenant = self.identify(headers)
        if self._header is not None and not tenant.member:
            raise self._nobody()
        return tenant

    def salt(self, tenant: Tenant, wanted: str) -> str:
        """The salt of a tenant's blocks. What the request wants divides them further, and never leads to another's."""
        if not tenant.name:
            return wanted
        state = _SALT.copy()
        for text in (tenant.key, tenant.member, wanted):
            field = text.encode("utf-8", "surrogatepass")
            state.update(struct.pack("<Q", len(field)) + field)
        return f"tenant {state.hexdigest()}"

    def _nobody(self) -> ApiError:
        message = f"the header {self._header} must name the tenant"
        return ApiError(401, message, param=self._header, code="tenant_required")

    def _member(self, headers: Mapping[str, str]) -> str:
        """What the tenants' header says; empty without it. Raises `ApiError` (400)."""
        name = None if self._header is None else only_value(headers, self._header)
        if name is None:
            return ""
        if not _NAME.fullmatch(name):
            message = f"{self._header} must be 1 to 256 visible ASCII characters without commas"
            raise ApiError.invalid(self._header, message)
        return name

    def _is_marked(self, headers: Mapping[str, str], header: str) -> bool:
        """Whether the operators' header says so. Raises `ApiError` (400)."""
        value = (only_value(headers, header) or "").lower()
        if value not in YES | NO:
            raise ApiError.invalid(header, f'{header} is {value[:40]!a}; it must be "true" or "false"')
        return value in YES

    def _owner(self, headers: Mapping[str, str]) -> Tenant:
        kind, _, key = (only_value(headers, "Authorization") or "").partition(" ")
        key = key if kind.lower() == "bearer" else _offered_key(headers.get("Sec-WebSocket-Protocol", ""))
        tenant = (self._keys or {}).get(_digest(key.strip()))
        if tenant is None:
            message = "the API key is wrong or missing; send it as Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return tenant


def only_value(headers: Mapping[str, str], name: str) -> str | None:
    """The value of a header, or None without it. Raises `ApiError` (400) if it is there more than once.

    A proxy that adds a header of its own to what a client sent must not leave the choice to the client.
    """
    if isinstance(headers, MultiMapping) and len(headers.getall(name, ())) > 1:
        raise ApiError.invalid(name, f"{name} is there more than once; it must be there once")
    return headers.get(name)


TENANTS = web.AppKey("tenants", Tenants)
TENANT = web.RequestKey("tenant", Tenant)
"""Whose request it is, on routes that need to know."""
PUBLIC = ("/health", "/v1/health", "/ping", "/version", "/metrics", "/docs", "/page/")
"""Beginnings of paths that need no API key: those of probes, Prometheus, the page's files and the documents."""
GENERATING = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
READABLE = ("/v1/stream", "/v1/models", "/v1/speculation", "/tokenizer_info")
"""Beginnings of paths that tenants may read; everything else is for operators."""


@web.middleware
async def only_who_may(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let nobody in without a key where keys are set, and only operators to what concerns all."""
    path = request.path
    is_served = request.match_info.http_exception is None
    if (is_served or path.startswith("/v1/")) and path != "/" and not path.startswith(PUBLIC):
        tenant = request[TENANT] = request.app[TENANTS].identify(request.headers)
        is_reading = request.method in {"GET", "HEAD"} and path.startswith(READABLE)
        if is_served and not (is_reading or path in GENERATING or tenant.is_operator):
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
