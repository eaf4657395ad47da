"""The metadata store of a pool: Redis 6.2 or newer, or Valkey. `redis_scripts` draws its keys."""

from __future__ import annotations

import asyncio
import re
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
import structlog
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from cache_store import redis_scripts
from cache_store.hashing import HASH_SIZE
from cache_store.metadata import (
    FORGOTTEN_HALF_LIVES,
    BlockBatch,
    EngineStatus,
    HotPrefix,
    PrefixUse,
    Retention,
    StoreUnavailable,
)

_T = TypeVar("_T")

MAX_REMEMBERED = 64
"""Unreadable values that are not logged again."""

_log = structlog.get_logger("forerun.metadata_store")


class _Text(msgspec.Struct, frozen=True, array_like=True):
    """What is kept of a hot prefix."""

    token_ids: tuple[int, ...]
    cache_salt: str


class RedisStore:
    """Satisfies `MetadataStore`. Connects when first used, and again by itself after an outage.

    No call takes longer than `timeout_seconds`, waiting for one of `max_connections` included.

    Memory on the server: at most 100 bytes for each block of each engine (measured with 20,000 blocks: 87 in Redis 7.0,
    71 in Redis 6.2, 42 in Valkey 9.1), at most 200 for each popular prefix, and about 5 for each kept token.
    """

    def __init__(
        self,
        url: str,
        *,
        namespace: str = "forerun",
        retention: Retention | None = None,
        timeout_seconds: float = 0.1,
        max_connections: int = 16,
    ) -> None:
        """`url` is redis://, rediss:// or unix://, as redis-py reads it. Raises ValueError for one that is not."""
        if not re.fullmatch(r"[\w.:-]+", namespace):
            raise ValueError(f"namespace is {namespace!r}, must be letters, digits, '_', '.', ':' and '-'")
        self._retention = retention or Retention()
        self._timeout = timeout_seconds
        self._prefix = f"{{{namespace}}}:"
        self._unreadable: set[bytes] = set()
        """Values that were left out, so that each is logged once."""
        self._ttl = round(1000 * self._retention.ttl_seconds)
        self._client = Redis.from_pool(
            BlockingConnectionPool.from_url(
                url,
                protocol=3,
                max_connections=max_connections,
                # One clock for the whole call, in `_bounded`: waiting for a connection, opening it, and the answer.
                timeout=None,
                socket_timeout=None,
                socket_connect_timeout=None,
                # One more try, within the same timeout: after a restart of the server each idle connection is found
                # dead when it is used next, and a live one is to be had. Every script may run twice.
                retry=Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
            )
        )
        register = self._client.register_script
        self._announce = register(redis_scripts.ANNOUNCE)
        self._engines = register(redis_scripts.ENGINES)
        self._publish = register(redis_scripts.PUBLISH)
        self._lookup = register(redis_scripts.LOOKUP)
        self._record = register(redis_scripts.RECORD)
        self._hot = register(redis_scripts.HOT)

    async def announce(self, status: EngineStatus) -> int | None:
        """See `MetadataStore`."""
        keys = [*self._keys("engines", "heard"), *self._engine_keys(status.engine_id), *self._keys("blocks:")]
        args = [status.engine_id, status.instance, msgspec.msgpack.encode(status), self._ttl]
        sequence: int | None = await self._run(self._announce, keys, args)
        return sequence

    async def publish(self, batch: BlockBatch) -> bool:
        """See `MetadataStore`."""
        args = [
            f"{batch.instance} {batch.sequence}",
            f"{batch.instance} {batch.sequence - 1}",
            int(batch.reset),
            self._ttl,
            b"".join(batch.stored),
            b"".join(batch.evicted),
        ]
        return bool(await self._run(self._publish, self._engine_keys(batch.engine_id), args))

    async def leave(self, engine_id: str) -> None:
        """See `MetadataStore`."""
        engines, heard = self._keys("engines", "heard")
        async with self._bounded():
            pipeline = self._client.pipeline(transaction=True)
            pipeline.hdel(engines, engine_id)
            pipeline.zrem(heard, engine_id)
            pipeline.unlink(*self._engine_keys(engine_id))
            await pipeline.execute()

    async def engines(self) -> list[EngineStatus]:
        """See `MetadataStore`."""
        packed = await self._run(self._engines, self._keys("engines", "heard", "blocks:"), [self._ttl])
        statuses = [self._decode(each, EngineStatus) for each in packed if each is not None]
        return [status for status in statuses if status is not None]

    async def lookup(self, hashes: Sequence[bytes], engine_ids: Sequence[str]) -> dict[str, int]:
        """See `MetadataStore`."""
        if not engine_ids:
            return {}
        keys = self._keys(*(f"blocks:{engine_id}" for engine_id in engine_ids))
        counts = await self._run(self._lookup, keys, [b"".join(hashes)])
        return dict(zip(engine_ids, counts, strict=True))

    async def record(self, uses: Sequence[PrefixUse]) -> None:
        """See `MetadataStore`."""
        if not uses:
            return
        retention = self._retention
        args: list[Any] = [
            retention.half_life_seconds,
            FORGOTTEN_HALF_LIVES,
            round(1000 * FORGOTTEN_HALF_LIVES * retention.half_life_seconds),
            retention.max_popular_prefixes,
            retention.max_hot_prefixes,
        ]
        for use in uses:
            keep = retention.max_hot_prefixes > 0 and 0 < len(use.token_ids) <= retention.max_hot_tokens
            text = _Text(tuple(use.token_ids), use.cache_salt)
            args += [use.block_hash + struct.pack("<I", use.num_tokens), msgspec.msgpack.encode(text) if keep else b""]
        await self._run(self._record, self._keys("popular", "hot"), args)

    async def hot_prefixes(self, limit: int) -> list[HotPrefix]:
        """See `MetadataStore`."""
        args = [self._retention.half_life_seconds, FORGOTTEN_HALF_LIVES, limit]
        found = []
        for prefix, uses, packed in await self._run(self._hot, self._keys("popular", "hot"), args):
            if len(prefix) != HASH_SIZE + 4:
                self._note_unreadable(prefix, f"a popular prefix of {len(prefix)} bytes, not {HASH_SIZE + 4}")
                continue
            text = self._decode(packed, _Text) if packed is not None else None
            found.append(
                HotPrefix(
                    block_hash=prefix[:HASH_SIZE],
                    num_tokens=struct.unpack("<I", prefix[HASH_SIZE:])[0],
                    uses=float(uses),
                    token_ids=text.token_ids if text else None,
                    cache_salt=text.cache_salt if text else "",
                )
            )
        return found

    async def close(self) -> None:
        """See `MetadataStore`."""
        await self._client.aclose()

    def _decode(self, packed: bytes, kind: type[_T]) -> _T | None:
        """One value; None, with one line in the log, for what is no `kind`."""
        try:
            return msgspec.msgpack.decode(packed, type=kind)
        except (ValueError, RecursionError) as error:
            self._note_unreadable(packed, f"no {kind.__name__}: {error}")
            return None

    def _note_unreadable(self, value: bytes, reason: str) -> None:
        """Log a value that is left out, once while it is among the last that were."""
        if value not in self._unreadable:
            if len(self._unreadable) >= MAX_REMEMBERED:
                self._unreadable.clear()
            self._unreadable.add(value)
            _log.warning("unreadable value in the metadata store", namespace=self._prefix, reason=reason[:300])

    def _keys(self, *names: str) -> list[str]:
        return [self._prefix + name for name in names]

    def _engine_keys(self, engine_id: str) -> list[str]:
        return self._keys(f"blocks:{engine_id}", f"sequence:{engine_id}")

    async def _run(self, script: AsyncScript, keys: Sequence[str], args: Sequence[Any]) -> Any:
        async with self._bounded():
            return await script(keys, args)

    @asynccontextmanager
    async def _bounded(self) -> AsyncIterator[None]:
        """Turn whatever keeps the server from answering into `StoreUnavailable`, after one timeout at the latest."""
        try:
            async with asyncio.timeout(self._timeout):
                yield
        except TimeoutError as error:
            raise StoreUnavailable(f"no answer within {self._timeout} s") from error
        except (RedisError, OSError) as error:
            raise StoreUnavailable(f"{type(error).__name__}: {error}") from error
