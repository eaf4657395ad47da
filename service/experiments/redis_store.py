"""The experiment store of several fronts: Redis 6.2 or newer, or Valkey.

Each operation is one script, hence atomic and one round trip. All keys of a namespace share a hash tag.

    {NS}:documents        hash    name → document
    {NS}:revision         string  counts the writes to documents
    {NS}:tally:KEY        hash    name of a sum → the sum
    {NS}:units:KEY        zset    "hash arm" by hash, the smallest
    {NS}:number:KEY:FRONT string  number of the last batch that a front sent, for a day
    {NS}:trace:KEY        string
    {NS}:leader           string  the front that evaluates, while it says so
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

from cache_store.metadata import StoreUnavailable
from service.experiments.statistics.units import MAX_UNITS
from service.experiments.store import Snapshot, StoredValueError
from service.experiments.tally import Tally

_VALUE_FAULT = re.compile(r"WRONGTYPE|not a (valid )?float|not an integer|attempt to (compare|perform arithmetic)")
"""What the server says when a value that is there is of another kind, whatever its version."""

# Keys: documents, revision. Arguments: expected revision, then for each change its name, "1" or "0" and its document.
WRITE = """
if (redis.call('GET', KEYS[2]) or '0') ~= ARGV[1] then
    return 0
end
for i = 2, #ARGV, 3 do
    if ARGV[i + 1] == '1' then
        redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 2])
    else
        redis.call('HDEL', KEYS[1], ARGV[i])
    end
end
redis.call('INCR', KEYS[2])
return 1
"""

# Keys: documents, revision.
READ = """
return {redis.call('GET', KEYS[2]) or '0', redis.call('HGETALL', KEYS[1])}
"""

# Keys: tally, units, number. Arguments: number, most units, how many sums; names and amounts; hashes and members.
ADD = """
if tonumber(redis.call('GET', KEYS[3]) or '0') >= tonumber(ARGV[1]) then
    return 0
end
redis.call('SET', KEYS[3], ARGV[1], 'EX', 86400)
local first_unit = 4 + 2 * tonumber(ARGV[3])
for i = 4, first_unit - 1, 2 do
    redis.call('HINCRBYFLOAT', KEYS[1], ARGV[i], ARGV[i + 1])
end
for i = first_unit, #ARGV, 2 do
    redis.call('ZADD', KEYS[2], ARGV[i], ARGV[i + 1])
end
redis.call('ZREMRANGEBYRANK', KEYS[2], ARGV[2], -1)
return 1
"""

# Keys: tally, units.
TALLY = """
return {redis.call('HGETALL', KEYS[1]), redis.call('ZRANGE', KEYS[2], 0, -1)}
"""

# Keys: leader. Arguments: front, milliseconds. A leader that has more time left than anybody is given took it before
# the server's clock was set back, and may be gone.
LEAD = """
local leader = redis.call('GET', KEYS[1])
if leader and leader ~= ARGV[1] and redis.call('PTTL', KEYS[1]) <= tonumber(ARGV[2]) then
    return 0
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""


class RedisExperimentStore:
    """Satisfies `ExperimentStore`. Connects when first used, and again by itself after an outage.

    No call takes longer than `timeout_seconds`.
    """

    def __init__(self, url: str, *, namespace: str = "forerun", timeout_seconds: float = 1.0) -> None:
        """`url` is redis://, rediss:// or unix://, as redis-py reads it. Raises ValueError for one that is not."""
        if not re.fullmatch(r"[\w.:-]+", namespace):
            raise ValueError(f"namespace is {namespace!r}, must be letters, digits, '_', '.', ':' and '-'")
        self._prefix = f"{{{namespace}}}:experiments:"
        self._timeout = timeout_seconds
        self._client = Redis.from_pool(
            BlockingConnectionPool.from_url(
                url,
                protocol=3,
                max_connections=4,
                # One clock for the whole call, in `_bounded`. The client's own waits with `asyncio.wait_for`, which in
                # Python 3.11 may swallow a cancellation, and then a task could not be ended.
                timeout=None,
                socket_timeout=None,
                socket_connect_timeout=None,
                # An idle connection may be found dead after a restart of the server. Repeating is harmless: writes are
                # conditional on a revision, additions on their number.
                retry=Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
            )
        )
        register = self._client.register_script
        self._write = register(WRITE)
        self._read = register(READ)
        self._add = register(ADD)
        self._tally = register(TALLY)
        self._lead = register(LEAD)

    async def revision(self) -> int:
        async with self._bounded():
            return self._revision_of(await self._client.get(self._key("revision")) or 0)

    async def read(self) -> Snapshot:
        """See `ExperimentStore`."""
        revision, documents = await self._run(self._read, ["documents", "revision"], [])
        names = [name.decode(errors="backslashreplace") for name in documents[::2]]
        return Snapshot(self._revision_of(revision), dict(zip(names, documents[1::2], strict=True)))

    async def write(self, expected_revision: int, changes: Mapping[str, bytes | None]) -> bool:
        """See `ExperimentStore`."""
        args: list[Any] = [expected_revision]
        for name, document in changes.items():
            args += [name, int(document is not None), document or b""]
        return bool(await self._run(self._write, ["documents", "revision"], args))

    async def add(self, key: str, front: str, number: int, tally: Tally) -> None:
        """See `ExperimentStore`."""
        args: list[Any] = [number, MAX_UNITS, len(tally.sums)]
        for name, amount in tally.sums.items():
            args += [name, repr(float(amount))]
        for unit, arm in tally.units.items():
            args += [unit, f"{unit} {arm}"]
        await self._run(self._add, [f"tally:{key}", f"units:{key}", f"number:{key}:{front}"], args)

    async def tally(self, key: str) -> Tally:
        """See `ExperimentStore`."""
        sums, units = await self._run(self._tally, [f"tally:{key}", f"units:{key}"], [])
        try:
            amounts = [float(amount) for amount in sums[1::2]]
            if not all(map(math.isfinite, amounts)):
                raise ValueError("a sum is not finite")
            return Tally(
                sums=dict(zip([name.decode() for name in sums[::2]], amounts, strict=True)),
                units={int(unit): int(arm) for unit, arm in (member.split() for member in units)},
            )
        except ValueError as error:
            raise StoredValueError(f"{self._key(f'tally:{key}')} cannot be read: {error}") from error

    async def save_trace(self, key: str, trace: bytes) -> None:
        async with self._bounded():
            await self._client.set(self._key(f"trace:{key}"), trace)

    async def trace(self, key: str) -> bytes | None:
        async with self._bounded():
            trace: Any = await self._client.get(self._key(f"trace:{key}"))
            return None if trace is None else bytes(trace)

    async def lead(self, front: str, seconds: float) -> bool:
        """See `ExperimentStore`."""
        return bool(await self._run(self._lead, ["leader"], [front, round(1000 * seconds)]))

    async def forget(self, key: str) -> None:
        """See `ExperimentStore`."""
        async with self._bounded():
            await self._client.unlink(*(self._key(f"{kind}:{key}") for kind in ("tally", "units", "trace")))

    async def close(self) -> None:
        await self._client.aclose()

    def _revision_of(self, stored: bytes | str | int) -> int:
        try:
            return int(stored)
        except ValueError as error:
            raise StoredValueError(f"{self._key('revision')} is {str(stored)[:40]}, not a number") from error

    def _key(self, name: str) -> str:
        return self._prefix + name

    async def _run(self, script: AsyncScript, keys: list[str], args: list[Any]) -> Any:
        async with self._bounded():
            return await script([self._key(name) for name in keys], args)

    @asynccontextmanager
    async def _bounded(self) -> AsyncIterator[None]:
        """Turn whatever keeps the server from answering into `StoreUnavailable`, after one timeout at the latest."""
        try:
            async with asyncio.timeout(self._timeout):
                yield
        except TimeoutError as error:
            raise StoreUnavailable(f"no answer within {self._timeout} s") from error
        except ResponseError as error:
            kind = StoredValueError if _VALUE_FAULT.search(str(error)) else StoreUnavailable
            raise kind(f"{type(error).__name__}: {error}") from error
        except (RedisError, OSError) as error:
            raise StoreUnavailable(f"{type(error).__name__}: {error}") from error
