"""Which engine gets a request: rules on made-up quotes, and what a front knows of who holds what."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest

from cache_store.metadata import BlockBatch, EngineStatus
from service.pool.member import Member
from service.pool.routing import LeastTtft, Load, PrefixOnly, Quote, RandomRouting, RoundRobin, Routing
from service.pool.statistics import NOTHING
from speculation.messages import BlocksChanged
from tests.service.pool.conftest import READY, Pool, make_pool, output, submit

NAMES = ("a", "b", "c")


def quotes(*ttft: float, cached: tuple[int, ...] = (), live: tuple[int, ...] = ()) -> list[Quote]:
    """One quote an engine."""
    return [
        Quote(
            engine_id=name,
            ttft=seconds,
            num_cached_tokens=cached[index] if cached else 0,
            num_live=live[index] if live else 0,
        )
        for index, (name, seconds) in enumerate(zip(NAMES, ttft, strict=False))
    ]


def test_the_soonest_first_token_wins() -> None:
    """An engine that is clearly sooner is chosen, whether it holds more of the prompt or less."""
    routing = LeastTtft()
    assert routing.choose(quotes(0.5, 0.1, 0.4)).engine_id == "b"
    assert routing.choose(quotes(0.5, 0.1, 0.4, cached=(480, 0, 0))).engine_id == "b"


def test_the_holder_is_kept_against_small_gains() -> None:
    """Where the holder is a little later than another it is kept: moving a prefix costs the others there."""
    routing = LeastTtft(margin=0.1)
    assert routing.choose(quotes(0.100, 0.095, cached=(480, 0))).engine_id == "a"
    assert routing.choose(quotes(0.100, 0.080, cached=(480, 0))).engine_id == "b"


def test_equals_take_turns() -> None:
    """Idle engines that hold nothing get new prefixes one after the other, not all the first."""
    routing = LeastTtft()
    assert [routing.choose(quotes(0.1, 0.1, 0.1)).engine_id for _ in range(6)] == list("abcabc")


def test_an_overloaded_holder_gives_a_hot_prefix_away() -> None:
    """Prefix-only drowns its holder; by predicted time a burst spreads when the queue costs more than computing."""
    loads = dict.fromkeys(NAMES, 0)
    held = Counter(a=480)

    def burst(routing: Routing, num_requests: int) -> Counter[str]:
        waiting, holds = Counter(loads), Counter(held)
        for _ in range(num_requests):
            offers = [
                Quote(
                    engine_id=name,
                    ttft=Load(pending_tokens=waiting[name], prefill_tokens_per_second=1000.0).predict_ttft(
                        520 - holds[name]
                    ),
                    num_cached_tokens=holds[name],
                    num_live=0,
                )
                for name in NAMES
            ]
            chosen = routing.choose(offers)
            waiting[chosen.engine_id] += 520 - holds[chosen.engine_id]
            holds[chosen.engine_id] = 480
        return waiting

    assert set(+burst(PrefixOnly(), 60)) == {"a"}
    spread = burst(LeastTtft(), 60)
    assert set(+spread) == set(NAMES)
    assert max(spread.values()) < 0.6 * 60 * 40
    assert set(+burst(LeastTtft(), 10)) == {"a"}


def test_the_queue_counts() -> None:
    """Predicted is the queue, then what of the prompt is uncomputed, then who must end before a place is free."""
    load = Load(pending_tokens=500, num_live=10, max_num_seqs=8, prefill_tokens_per_second=1000, sequence_seconds=4.0)
    assert load.predict_ttft(250) == pytest.approx(0.75 + 3 * 4.0 / 8)
    assert Load(pending_tokens=500, prefill_tokens_per_second=1000).predict_ttft(250) == pytest.approx(0.75)


def test_the_other_rules() -> None:
    """Prefix-only goes by the prefix and then the fewest sequences; round robin takes turns; random takes any."""
    assert PrefixOnly().choose(quotes(9.0, 0.1, cached=(16, 0))).engine_id == "a"
    assert PrefixOnly().choose(quotes(0.1, 0.1, 0.1, live=(3, 1, 2))).engine_id == "b"
    robin = RoundRobin()
    assert [robin.choose(quotes(1.0, 2.0)).engine_id for _ in range(4)] == list("abab")
    chance = RandomRouting(random.Random(1))
    assert {chance.choose(quotes(1.0, 2.0, 3.0)).engine_id for _ in range(50)} == set(NAMES)


PROMPT = [*range(96), 1, 2, 3]


async def test_a_prefix_goes_back_to_who_reports_it() -> None:
    """Long after it was sent, an engine that says it holds the blocks is chosen; once it evicts them, no more."""
    pool = make_pool(3, LeastTtft())
    for engine in pool.engines:
        engine.member.observer = Reports(pool, engine.member)
    hashes = pool.prefixes.hashes(READY, submit("x", prompt=PROMPT))
    pool.engines[2].member.dispatch(BlocksChanged(hashes, []))
    pool.time[0] += 1000
    for number in range(3):
        async with pool.pool.submit([submit(f"{number}", prompt=PROMPT)]):
            assert pool.holder(f"{number}") is pool.engines[2]
    assert pool.prompts[-1][2] == len(hashes) == 6
    pool.engines[2].member.dispatch(BlocksChanged([], hashes[3:]))
    held = await pool.prefixes.held(hashes, pool.pool.serving)
    assert held == {"engine-0": 0, "engine-1": 0, "engine-2": 6}, "sent just now counts as held"
    pool.time[0] += 1000
    held = await pool.prefixes.held(hashes, pool.pool.serving)
    assert held == {"engine-0": 0, "engine-1": 0, "engine-2": 3}


class Reports:
    """An observer that only tells the front."""

    def __init__(self, pool: Pool, member: Member) -> None:
        self._prefixes, self._engine_id = pool.prefixes, member.engine_id

    def joined(self) -> None:
        pass

    def changed(self, change: BlocksChanged) -> None:
        self._prefixes.report(self._engine_id, change)

    def left(self) -> None:
        pass


async def test_the_store_is_asked_of_engines_that_tell_it() -> None:
    """Of an engine that does not report here the store is asked; what was sent a moment ago needs no report."""
    pool = make_pool(2, LeastTtft())
    hashes = pool.prefixes.hashes(READY, submit("x", prompt=PROMPT))
    status = EngineStatus(engine_id="engine-1", instance="i", address="tcp://x:1", model_fingerprint="f")
    await pool.store.announce(status)
    batch = BlockBatch(engine_id="engine-1", instance="i", sequence=1, reset=True, stored=hashes[:4])
    await pool.store.publish(batch)
    assert await pool.prefixes.held(hashes, pool.pool.serving) == {"engine-0": 0, "engine-1": 4}
    async with pool.pool.submit([submit("a", prompt=PROMPT)]):
        assert pool.holder("a") is pool.engines[1]
    assert await pool.prefixes.held(hashes, pool.pool.serving) == {"engine-0": 0, "engine-1": 6}


async def test_without_a_store_what_was_sent_has_to_do() -> None:
    """While the store does not answer, an engine is taken to hold what it was last sent, if that fits into it."""
    pool = make_pool(2, LeastTtft())
    hashes = pool.prefixes.hashes(READY, submit("x", prompt=PROMPT))
    pool.prefixes.sent(pool.engines[1].member, hashes)
    pool.time[0] += 1000
    assert pool.prefixes.guess(hashes, pool.pool.serving) == {"engine-0": 0, "engine-1": 6}
    other = pool.prefixes.hashes(READY, submit("x", prompt=list(range(1, 1600))))
    pool.prefixes.sent(pool.engines[1].member, other)
    assert pool.prefixes.guess(hashes, pool.pool.serving)["engine-1"] == 0
    pool.engines[1].die()
    pool.engines[1].serve()
    assert pool.prefixes.guess(hashes, pool.pool.serving) == {"engine-0": 0, "engine-1": 0}


async def test_a_prompt_whose_logprobs_are_wanted_has_no_cached_prefix() -> None:
    """Every row of it must be computed, so no engine is preferred for holding it."""
    wanted = msgspec.structs.replace(submit("x", prompt=PROMPT), prompt_logprobs=0)
    assert make_pool(1).prefixes.hashes(READY, wanted) == []


async def test_a_burst_of_one_prefix_stays_together_until_it_is_too_much() -> None:
    """Ten questions behind one long prefix, at once: the first computes it, and the next go to the same engine."""
    pool = make_pool(3, LeastTtft())
    prefix = list(range(90)) * 5
    async with pool.pool.submit([submit("first", prompt=[*prefix, 1])]):
        home = pool.holder("first")
        home.say(output("first", 5))
        for number in range(10):
            stream = pool.pool.submit([submit(f"{number}", prompt=[*prefix, number, number])])
            async with stream:
                assert pool.holder(f"{number}") is home


@pytest.mark.parametrize(("kind", "expected"), [("cuda", 1), ("cpu", 0)])
async def test_engines_of_a_kind_are_taken_to_be_as_fast(kind: str, expected: int) -> None:
    """A rate that is low for its moment keeps nobody from an idle engine; that of a slower kind does."""
    pool = make_pool(2, LeastTtft())
    pool.engines[0].member.attach(msgspec.structs.replace(READY, description="cuda"), lambda _command: None)
    pool.engines[1].member.attach(msgspec.structs.replace(READY, description=kind), lambda _command: None)
    for engine, rate in zip(pool.engines, (10_000.0, 1000.0), strict=True):
        engine.member.dispatch(msgspec.structs.replace(NOTHING, prefill_tokens_per_second=rate))
    async with pool.pool.submit([submit("busy", prompt=list(range(300)))]):
        assert pool.holder("busy") is pool.engines[0]
        async with pool.pool.submit([submit("next", prompt=list(range(300, 600)))]):
            assert pool.holder("next") is pool.engines[expected]
