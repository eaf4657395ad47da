"""How much of what each tenant asked was found in the prefix caches."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

MAX_TENANTS = 1024
OTHERS = "(others)"


class CacheUse(msgspec.Struct, kw_only=True):
    """Of one tenant, since the front started."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """Cached / prompt tokens."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def add(self, requests: int, prompt_tokens: int, cached_tokens: int) -> None:
        self.requests += requests
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens


class CacheStatistics:
    """Counts by tenant, of at most `MAX_TENANTS`; who has not asked for longest is counted with the others."""

    def __init__(self, max_tenants: int = MAX_TENANTS) -> None:
        self.total = CacheUse()
        self.by_tenant: OrderedDict[str, CacheUse] = OrderedDict()
        self._max_tenants = max_tenants

    def note(self, tenant: str, *, prompt_tokens: int, cached_tokens: int) -> None:
        """A request was answered."""
        self.total.add(1, prompt_tokens, cached_tokens)
        self._of(tenant).add(1, prompt_tokens, cached_tokens)
        if len(self.by_tenant) > self._max_tenants:
            oldest = next(name for name in self.by_tenant if name != OTHERS)
            gone = self.by_tenant.pop(oldest)
            self._of(OTHERS).add(gone.requests, gone.prompt_tokens, gone.cached_tokens)

    def _of(self, tenant: str) -> CacheUse:
        use = self.by_tenant.setdefault(tenant, CacheUse())
        self.by_tenant.move_to_end(tenant)
        return use
