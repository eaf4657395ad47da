"""The pool: places sequences on engines, and places them again when an engine dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import mean

import structlog

from service.background import run_forever
from service.engine_client import EngineRejectedError, EngineUnavailableError, OutputStream
from service.pool.flight import Flight
from service.pool.member import Member
from service.pool.prefixes import Prefixes
from service.pool.routing import Quote, Routing
from service.pool.statistics import add
from speculation.messages import Ready, Rejected, SequenceOutput, Stats, Submit

RETRY_SECONDS = 0.1
"""How often sequences that wait for an engine look for one."""
PROBATION_SECONDS = 5.0
"""How long a sequence whose engines died early waits for others to be restarted, before the last one may have it."""
MEMORY = 0.95
"""How much of a running mean the past keeps."""


class EnginePool:
    """Satisfies `EngineClient` for all engines together.

        open ──► place ──► an engine ──► outputs, the last one ends it
                  ▲  ▲         │
                  │  └─ waits  └── the engine dies, or refuses
                  └─────┴───────────┘   what was delivered is kept; another engine goes on behind it

    A sequence that was aboard when `failover_attempts` engines in a row died early is given up: it may be what kills
    them. A suspect is kept off the last serving engine for a while, and for its last try away from other suspects.
    """

    def __init__(
        self,
        routing: Routing,
        prefixes: Prefixes,
        *,
        on_stats: Callable[[Stats], None],
        on_gap: Callable[[float], object],
        on_prompt: Callable[[Submit, Sequence[bytes], int, int], object],
        failover_seconds: float,
        failover_attempts: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_gap` is told the seconds between two outputs of a sequence; `on_prompt` of every prompt its blocks, how
        many of the leading ones some engine held, and how many tokens a block has. Neither hears of internal sequences.
        """
        self.members: dict[str, Member] = {}
        self.opened = asyncio.Event()
        """Set when the first engine serves."""
        self.num_resumed = 0
        """Sequences that went on elsewhere, each time counted."""
        self.num_given_up = 0
        self._routing = routing
        self._prefixes = prefixes
        self._on_stats = on_stats
        self._on_gap = on_gap
        self._on_prompt = on_prompt
        self._failover_seconds = failover_seconds
        self._failover_attempts = failover_attempts
        self._clock = clock
        self._flights: dict[str, Flight] = {}
        self._waiting: dict[str, Flight] = {}
        """Of the flights those that no engine has."""
        self._typical_tokens = 0.0
        """Running mean of the prompt tokens that an engine has to compute."""
        self._log = structlog.get_logger("forerun.pool")

    @property
    def num_live(self) -> int:
        """Sequences that were submitted and have not ended."""
        return len(self._flights)

    @property
    def num_waiting(self) -> int:
        """Of them, those that wait for an engine that takes over."""
        return len(self._waiting)

    @property
    def serving(self) -> list[Member]:
        """Engines that take sequences, in a fixed order."""
        return [member for member in self.members.values() if member.is_serving]

    @property
    def ready(self) -> Ready | None:
        """What an engine that serves said of itself; None if none serves."""
        return next((member.ready for member in self.serving), None)

    @property
    def capacity(self) -> int:
        """How many sequences the serving engines run and queue."""
        return sum(member.capacity for member in self.serving)

    def add(self, engine_id: str, address: str) -> Member:
        """A new engine of the pool, which does not serve yet."""
        member = self.members[engine_id] = Member(self, engine_id, address)
        return member

    def remove(self, member: Member) -> None:
        """It will not come back. It must not be serving."""
        del self.members[member.engine_id]

    async def run(self) -> None:
        """Find engines for sequences that wait for one, until cancelled."""

        async def place_waiting() -> None:
            self._place_waiting()

        await run_forever("waiting sequences", place_waiting, RETRY_SECONDS)

    def submit(self, submits: Sequence[Submit], *, is_internal: bool = False) -> OutputStream:
        """The outputs of one request's sequences. Entering the context submits them.

        `is_internal`: the service asks for itself, and nothing that is measured for users counts them.
        """
        return OutputStream(self, submits, is_internal=is_internal)

    async def open(self, stream: OutputStream, submits: Sequence[Submit]) -> None:
        """Send a stream's sequences. Raises `EngineUnavailableError` if no engine serves, or what `Member.take` does.

        When it raises, sequences that were sent before are still counted: `OutputStream` forgets them.
        """
        ready = self.ready
        if ready is None:
            raise EngineUnavailableError("no engine is ready; try again shortly", "engine_not_ready")
        flights = [Flight(stream, submit, self._prefixes.hashes(ready, submit)) for submit in submits]
        prompts = {flight.prompt_key: flight for flight in flights}
        found = await asyncio.gather(*(self._prefixes.held(each.hashes, self.serving) for each in prompts.values()))
        held = dict(zip(prompts, found, strict=True))
        for key, flight in prompts.items():
            if not stream.is_internal:
                self._on_prompt(flight.submit, flight.hashes, max(held[key].values(), default=0), ready.block_size)
        now = self._clock()
        for flight in flights:
            flight.waits_since = now
            self._place(flight, held[flight.prompt_key])
            self._flights[flight.request_id] = flight
            if flight.member is not None:  # its siblings may share what it computes
                held[flight.prompt_key][flight.member.engine_id] = len(flight.hashes)

    def abort(self, request_id: str) -> None:
        """End a sequence; its last output still comes."""
        flight = self._flights.get(request_id)
        if flight is None:
            return
        flight.is_aborted = True
        if flight.member is not None:
            flight.member.abort(request_id)
        else:
            self._drop(flight)
            flight.deliver_abort()

    def forget(self, request_id: str) -> None:
        """Nobody waits for this sequence any more: end it, and drop what still comes of it."""
        flight = self._flights.get(request_id)
        if flight is not None:
            self._drop(flight)
            if flight.member is not None:
                flight.member.flights.pop(request_id, None)
                flight.member.abort(request_id)

    def end_all(self, error: EngineUnavailableError) -> None:
        """End every sequence; everybody who waits gets `error`."""
        for flight in list(self._flights.values()):
            self.forget(flight.request_id)
            flight.stream.fail(error)

    def joined(self) -> None:
        """An engine has begun to serve."""
        self.opened.set()
        self._place_waiting()

    def lost(self, member: Member, flights: Sequence[Flight], error: EngineUnavailableError) -> None:
        """An engine has died with these on board. They go on elsewhere, unless the service ends."""
        self._prefixes.forget(member.engine_id)
        for flight in flights:
            try:
                self._lost(flight, error)
            except Exception as broken:  # noqa: BLE001 - ends this sequence alone
                self._end_broken(flight, broken)
        if flights and error.code != "shutting_down":
            self._log.warning("engine lost", engine=member.engine_id, resumed=len(flights), waiting=len(self._waiting))

    def rejected(self, member: Member, flight: Flight, rejected: Rejected) -> None:
        """An engine does not take a sequence: perhaps another does."""
        try:
            self._rejected(member, flight, rejected)
        except Exception as broken:  # noqa: BLE001 - ends this sequence alone
            self._end_broken(flight, broken)

    def deliver(self, flight: Flight, output: SequenceOutput) -> None:
        """An output has come."""
        try:
            self._deliver(flight, output)
        except Exception as broken:  # noqa: BLE001 - ends this sequence alone
            self._end_broken(flight, broken)

    def note_stats(self) -> None:
        """An engine has said new numbers."""
        self._on_stats(add([member.totals.all for member in self.members.values()]))

    def _lost(self, flight: Flight, error: EngineUnavailableError) -> None:
        if flight.is_aborted:
            self._drop(flight)
            flight.deliver_abort()
        elif error.code == "shutting_down":
            self._fail(flight, error)
        elif flight.num_strikes >= self._failover_attempts:
            self._give_up(flight, f"{flight.num_strikes} engines died soon after they took it; the last: {error}")
        else:
            self.num_resumed += 1
            self._resume(flight)

    def _rejected(self, member: Member, flight: Flight, rejected: Rejected) -> None:
        flight.member = None
        if rejected.code == "draining":
            member.is_draining = True
        elif rejected.code != "overloaded":
            self._fail(flight, EngineRejectedError(rejected))
            return
        flight.refused_by.add(member.engine_id)
        is_news = not flight.has_begun and not flight.num_strikes
        if rejected.code == "overloaded" and is_news and not self._candidates(flight):
            self._fail(flight, EngineRejectedError(rejected))
        else:
            self._resume(flight)

    def _deliver(self, flight: Flight, output: SequenceOutput) -> None:
        if output.finish_reason is not None:
            self._drop(flight)
            if (member := flight.member) is not None:
                del member.flights[flight.request_id]
                if not flight.stream.is_internal:
                    seconds = self._clock() - flight.placed_at
                    member.sequence_seconds = _mean(member.sequence_seconds, seconds)
        gap = flight.deliver(output)
        if gap is not None and not flight.stream.is_internal:
            self._on_gap(gap)

    def _resume(self, flight: Flight) -> None:
        flight.waits_since = self._clock()
        self._place(flight, self._prefixes.guess(flight.hashes, self.serving))

    def _place_waiting(self) -> None:
        """Whoever waits gets an engine, if there is one by now, or an error, if that took too long."""
        now = self._clock()
        for flight in list(self._waiting.values()):
            try:
                self._place_again(flight, now)
            except Exception as broken:  # noqa: BLE001 - ends this sequence alone
                self._end_broken(flight, broken)

    def _place_again(self, flight: Flight, now: float) -> None:
        if now - flight.waits_since > self._failover_seconds and not self._is_behind_suspects(flight):
            self._give_up(flight, f"no other engine could take over within {self._failover_seconds:g} s")
            return
        flight.refused_by.clear()
        self._place(flight, self._prefixes.guess(flight.hashes, self.serving))

    def _place(self, flight: Flight, held: dict[str, int]) -> None:
        """Give a sequence to the engine that the routing chooses; or let it wait, if none may have it now.

        Raises what `Member.take` raises; then no engine has it.
        """
        candidates = self._candidates(flight)
        if not candidates:
            self._waiting[flight.request_id] = flight
            return
        self._waiting.pop(flight.request_id, None)
        num_prompt = len(flight.submit.prompt_token_ids)
        rates = self._prefill_rates()
        quotes = [self._quote(each, rates, num_prompt, held.get(each.engine_id, 0)) for each in candidates]
        quote = self._routing.choose(quotes)
        flight.num_uncached_tokens = num_prompt - quote.num_cached_tokens
        if not flight.stream.is_internal:
            self._typical_tokens = _mean(self._typical_tokens, flight.num_uncached_tokens)
        member = self.members[quote.engine_id]
        member.take(flight, flight.remainder())
        flight.begin_life(member, self._clock())
        self._prefixes.sent(member, flight.hashes)

    def _quote(self, member: Member, rates: Mapping[str, float], num_prompt: int, num_held: int) -> Quote:
        num_cached = num_held * member.ready.block_size if member.ready is not None else 0
        load = member.load(self._typical_tokens, rates.get(member.kind, 0.0))
        return Quote(
            engine_id=member.engine_id,
            num_cached_tokens=num_cached,
            ttft=load.predict_ttft(num_prompt - num_cached),
            compute_seconds=load.compute_seconds(num_prompt - num_cached),
            num_live=load.num_live,
        )

    def _prefill_rates(self) -> dict[str, float]:
        """What engines of each kind compute a second, at the mean of those that say so.

        Not each its own: an engine that was slow once, because others took its cores or its prompts were short, would
        get no more prompts to show that it no longer is.
        """
        rates: dict[str, list[float]] = {}
        for member in self.serving:
            if member.prefill_rate > 0.0:
                rates.setdefault(member.kind, []).append(member.prefill_rate)
        return {kind: mean(known) for kind, known in rates.items()}

    def _candidates(self, flight: Flight) -> list[Member]:
        """Engines that may have a sequence now."""
        serving = self.serving
        submit = flight.submit
        num_tokens = len(submit.prompt_token_ids) + submit.sampling.max_tokens
        fitting = [member for member in serving if member.context_length >= num_tokens] or serving
        found = [member for member in fitting if member.engine_id not in flight.refused_by]
        if not flight.num_strikes:
            return found
        is_last = len(serving) == 1 and any(member.state in {"loading", "warming"} for member in self.members.values())
        if is_last and self._clock() - flight.waits_since <= PROBATION_SECONDS:
            return []
        if flight.num_strikes == self._failover_attempts - 1:
            return [member for member in found if not self._has_suspect(member, flight.num_strikes)]
        return found

    def _is_behind_suspects(self, flight: Flight) -> bool:
        """Whether it is kept waiting for its last try by others that make theirs, each of which soon has an end."""
        is_last_try = flight.num_strikes == self._failover_attempts - 1
        return is_last_try and any(self._has_suspect(member, flight.num_strikes) for member in self.serving)

    @staticmethod
    def _has_suspect(member: Member, num_strikes: int) -> bool:
        return any(flight.num_strikes >= num_strikes for flight in member.flights.values())

    def _give_up(self, flight: Flight, reason: str) -> None:
        self.num_given_up += 1
        message = f"the engine stopped while this request ran, and it could not go on: {reason}"
        self._fail(flight, EngineUnavailableError(message, "engine_died"))

    def _end_broken(self, flight: Flight, error: Exception) -> None:
        """End one sequence whose handling raised `error`, here and on its engine. No other sequence notices."""
        self._log.error("sequence ended by an error", sequence=flight.request_id, reason=str(error), exc_info=error)
        self.num_given_up += 1
        self.forget(flight.request_id)
        if not isinstance(error, EngineRejectedError):
            message = "this request could not go on because of an error in the service; its log has the details"
            error = EngineUnavailableError(message, "engine_died")
        flight.stream.fail(error)

    def _fail(self, flight: Flight, error: Exception) -> None:
        self._drop(flight)
        flight.stream.fail(error)

    def _drop(self, flight: Flight) -> None:
        self._flights.pop(flight.request_id, None)
        self._waiting.pop(flight.request_id, None)


def _mean(past: float, value: float) -> float:
    """A running mean that begins with the first value."""
    return MEMORY * past + (1.0 - MEMORY) * value if past else value
