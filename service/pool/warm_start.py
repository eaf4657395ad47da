"""A fresh engine computes what everybody asks for before it serves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from cache_store.hashing import block_hashes, root_hash
from cache_store.metadata import HotPrefix
from service.engine_client import EngineRejectedError, EngineUnavailableError, OutputStream
from service.pool.flight import Flight
from service.pool.member import Member
from speculation.messages import NoSpeculation, Ready, SamplingParams, Submit

_log = structlog.get_logger("forerun.pool")


async def warm(member: Member, hot: Sequence[HotPrefix], seconds: float) -> int:
    """Let `member` compute hot prefixes, most popular first, for at most `seconds`. How many it has now.

    One after the other, so that being out of time leaves the less popular uncomputed, not all of them halfway.
    """
    ready = member.ready
    if ready is None:
        return 0
    num_warm = 0
    try:
        async with asyncio.timeout(seconds):
            for submit in _submits(ready, hot):
                try:
                    async with OutputStream(_Only(member), [submit]) as stream:
                        await stream.take()
                except EngineRejectedError as error:
                    _log.warning("hot prefix not computed", engine=member.engine_id, reason=str(error))
                else:
                    num_warm += 1
    except (TimeoutError, EngineUnavailableError) as error:
        _log.warning("warm start ended early", engine=member.engine_id, reason=str(error) or "out of time")
    _log.info("warm start", engine=member.engine_id, prefixes=num_warm)
    return num_warm


def _submits(ready: Ready, hot: Sequence[HotPrefix]) -> list[Submit]:
    """What makes an engine compute each prefix: one token behind it. Only what is of its model, and whole."""
    submits = []
    for number, prefix in enumerate(hot):
        if prefix.token_ids is None:
            continue
        token_ids = list(prefix.token_ids)
        root = root_hash(ready.model_fingerprint, prefix.cache_salt)
        try:
            hashes = block_hashes(root, token_ids, ready.block_size)
        except ValueError as error:
            _log.warning("hot prefix in the store is unreadable; it is left out", reason=str(error))
            continue
        if hashes[-1:] != [prefix.block_hash]:
            continue
        submits.append(
            Submit(
                request_id=f"warm-start-{number}",
                # The block with the last token is never looked up, so one more token makes the last block count.
                prompt_token_ids=[*token_ids, token_ids[0]],
                sampling=SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0),
                speculation=NoSpeculation(),
                cache_salt=prefix.cache_salt,
            )
        )
    return submits


class _Only:
    """Satisfies `EngineClient` for one member, whoever else serves."""

    def __init__(self, member: Member) -> None:
        self._member = member

    async def open(self, stream: OutputStream, submits: Sequence[Submit]) -> None:
        if self._member.ready is None:
            raise EngineUnavailableError("it died", "engine_died")
        for submit in submits:
            flight = Flight(stream, submit)
            flight.is_aborted = True  # it does not go on elsewhere
            self._member.take(flight, submit)
            flight.begin_life(self._member, 0.0)

    def abort(self, request_id: str) -> None:
        self._member.abort(request_id)

    def forget(self, request_id: str) -> None:
        if self._member.flights.pop(request_id, None) is not None:
            self._member.abort(request_id)
