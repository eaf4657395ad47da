"""Who gets which sequence and which output, and what happens when an engine dies: without an engine."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from service.engine_client import EngineRejectedError, EngineUnavailableError
from service.pool.engine_pool import PROBATION_SECONDS
from service.pool.routing import LeastTtft
from service.pool.statistics import NOTHING
from speculation.messages import Abort, Drain, Rejected, SequenceOutput
from tests.service.pool.conftest import Pool, make_pool, output, submit


def tokens(outputs: list[SequenceOutput]) -> list[int]:
    return [token_id for each in outputs for token_id in each.token_ids]


async def test_outputs_wait_until_they_are_taken(one: Pool) -> None:
    """What arrived meanwhile comes at once and in order; nobody else's is among it."""
    engine = one.engines[0]
    async with one.pool.submit([submit("a"), submit("b")]) as stream:
        engine.say(output("a", 1), output("b", 2), output("x", 9))
        engine.say(output("a", 3, finish="length"))
        assert [(o.request_id, o.token_ids) for o in await stream.take()] == [("a", [1]), ("b", [2]), ("a", [3])]
        engine.say(output("b", 4, finish="stop"))
        await stream.take()
        assert stream.is_finished
    assert one.pool.num_live == 0
    assert len(one.gaps) == 2


async def test_leaving_aborts_what_still_runs(one: Pool) -> None:
    """Only sequences that have not ended are aborted, and their later outputs are dropped."""
    engine = one.engines[0]
    async with one.pool.submit([submit("a"), submit("b")]):
        engine.say(output("a", 1, finish="length"))
    assert engine.sent[2:] == [Abort("b")]
    engine.say(output("b", 2))
    assert one.pool.num_live == 0
    assert engine.member.flights == {}


async def test_a_rejection_reaches_its_request_and_ends_its_siblings(one: Pool) -> None:
    """One rejected sequence is the whole request's error; the others of it are aborted."""
    engine = one.engines[0]
    async with one.pool.submit([submit("a"), submit("b")]) as stream:
        engine.member.dispatch(Rejected(request_id="b", code="overloaded", message="full"))
        with pytest.raises(EngineRejectedError):
            await stream.take()
    assert engine.sent[2:] == [Abort("a")]
    assert one.pool.num_live == 0


async def test_nothing_is_taken_while_no_engine_serves(one: Pool) -> None:
    """A new request is told at once that no engine is there; it does not wait for one."""
    one.engines[0].die()
    with pytest.raises(EngineUnavailableError, match="no engine is ready"):
        async with one.pool.submit([submit("a")]):
            pass


async def test_a_sequence_goes_on_elsewhere_behind_what_was_delivered(two: Pool) -> None:
    """The second engine is asked to go on behind exactly the delivered tokens, and its outputs follow in the stream."""
    async with two.pool.submit([submit("a", max_tokens=10)]) as stream:
        first = two.holder("a")
        first.say(output("a", 1, 2), output("a", 3), output("a", 4))
        first.say(output("a", 5))
        first.die()
        second = two.holder("a")
        assert second is not first
        assert second.submitted[-1].output_token_ids == [1, 2, 3, 4, 5]
        assert second.submitted[-1].sampling == first.submitted[-1].sampling
        second.say(output("a", 6, finish="length"))
        assert tokens(await stream.take()) == [1, 2, 3, 4, 5, 6]
        assert stream.is_finished
    assert two.pool.num_resumed == 1


async def test_what_a_dead_engine_still_says_is_not_heard(two: Pool) -> None:
    """Outputs of an engine that was given up reach nobody, whoever has the sequence now."""
    async with two.pool.submit([submit("a", max_tokens=10)]) as stream:
        first = two.holder("a")
        first.say(*(output("a", token_id) for token_id in range(4)))
        first.die()
        first.say(output("a", 9))
        two.holder("a").say(output("a", 4, finish="length"))
        assert tokens(await stream.take()) == [0, 1, 2, 3, 4]


async def test_prompt_logprobs_come_once(two: Pool) -> None:
    """They are asked for again only if the dead engine had not brought them."""
    wants = [msgspec.structs.replace(submit(name, max_tokens=10), prompt_logprobs=0) for name in ("a", "b")]
    async with two.pool.submit(wants):
        first = two.holder("a")
        first.say(msgspec.structs.replace(output("a", 5), prompt_logprobs=[]))
        other = next(engine for engine in two.engines if engine is not first)
        other.die()
        first.die()
        other.serve()
        two.wait(PROBATION_SECONDS + 1)
        by_name = {submitted.request_id: submitted for submitted in other.submitted}
        assert by_name["a"].prompt_logprobs is None
        assert by_name["b"].prompt_logprobs == 0


async def test_with_one_engine_a_stream_waits_for_its_restart(one: Pool) -> None:
    """Nobody is told anything while the engine restarts; then the sequence goes on."""
    engine = one.engines[0]
    async with one.pool.submit([submit("a", max_tokens=10)]) as stream:
        engine.say(output("a", 5))
        assert tokens(await stream.take()) == [5]
        engine.die()
        assert one.pool.num_waiting == 1
        taking = asyncio.create_task(stream.take())
        one.wait(20)
        await asyncio.sleep(0)
        assert not taking.done()
        engine.serve()
        assert engine.submitted[-1].output_token_ids == [5]
        engine.say(output("a", 6, finish="stop"))
        assert tokens(await taking) == [6]


async def test_waiting_for_an_engine_has_an_end(one: Pool) -> None:
    """When none takes over in time, the request gets an error that says so, behind everything that had come."""
    async with one.pool.submit([submit("a")]) as stream:
        one.engines[0].say(output("a", 5))
        one.engines[0].die()
        one.wait(31)
        assert tokens(await stream.take()) == [5]
        with pytest.raises(EngineUnavailableError, match="within 30 s") as caught:
            await stream.take()
        assert caught.value.code == "engine_died"
    assert one.pool.num_live == 0


async def test_a_sequence_that_kills_engines_is_given_up(three: Pool) -> None:
    """After three engines died right behind taking it, it gets an error; one engine has always served."""
    async with three.pool.submit([submit("killer")]) as stream:
        for _ in range(3):
            engine = three.holder("killer")
            engine.say(output("killer", 5))
            engine.die()
            assert three.pool.serving
            engine.serve()
        assert three.pool.num_given_up == 1
        assert tokens(await stream.take()) == [5, 5, 5]
        with pytest.raises(EngineUnavailableError, match="3 engines died soon after they took it"):
            await stream.take()


async def test_a_suspect_is_kept_off_the_last_engine(two: Pool) -> None:
    """A sequence whose engine died early waits for the restart; one that had run well goes on at once."""
    async with two.pool.submit([submit("early"), submit("x"), submit("steady"), submit("y")]) as stream:
        first = two.holder("early")
        assert two.holder("steady") is first
        for token_id in range(5):
            first.say(output("steady", token_id))
        first.die()
        last = two.holder("steady")
        assert "early" not in last.member.flights
        first.serve()
        assert two.pool.num_waiting == 0
        assert await stream.take()


async def test_a_suspect_may_have_the_last_engine_in_the_end(two: Pool) -> None:
    """When the dead engine does not come back, the only one left is better than an error."""
    async with two.pool.submit([submit("a")]):
        first = two.holder("a")
        first.die()
        assert two.pool.num_waiting == 1
        two.wait(PROBATION_SECONDS + 1)
        assert two.holder("a") is not first


async def test_the_last_try_is_made_alone(three: Pool) -> None:
    """Of several sequences that were aboard when engines died, each has its last try where no other suspect is."""
    names = ["a", "b", "c"]
    for engine in three.engines[1:]:
        engine.die()
    async with three.pool.submit([submit(name) for name in names]):
        three.engines[1].serve()
        three.engines[0].die()
        three.wait(PROBATION_SECONDS + 1)
        three.engines[1].die()
        for engine in three.engines:
            engine.serve()
        three.wait(0.1)
        assert len({id(three.holder(name)) for name in names}) == 3


async def test_steady_sequences_survive_any_number_of_deaths(two: Pool) -> None:
    """An engine that brought several outputs did not die of the sequence: nothing is counted against it."""
    async with two.pool.submit([submit("a", max_tokens=100)]) as stream:
        for life in range(10):
            engine = two.holder("a")
            for index in range(4):
                engine.say(output("a", 4 * life + index))
            engine.die()
            engine.serve()
        assert tokens(await stream.take()) == list(range(40))
        assert two.pool.num_given_up == 0


async def test_an_abort_between_two_engines_ends_the_sequence(one: Pool) -> None:
    """A sequence that is cancelled while no engine has it ends with the reason "abort" and is not placed again."""
    async with one.pool.submit([submit("a")]) as stream:
        one.engines[0].say(output("a", 5))
        one.engines[0].die()
        stream.abort("a")
        assert [o.finish_reason for o in await stream.take()] == [None, "abort"]
        assert stream.is_finished
        one.engines[0].serve()
    assert len(one.engines[0].submitted) == 1


async def test_an_abort_that_the_engine_did_not_answer_is_kept(two: Pool) -> None:
    """An engine that dies before it has ended a cancelled sequence does not bring it back to life."""
    async with two.pool.submit([submit("a")]) as stream:
        stream.abort("a")
        two.holder("a").die()
        assert [o.finish_reason for o in await stream.take()] == ["abort"]
    assert two.pool.num_live == 0


async def test_shutting_down_ends_everybody(two: Pool) -> None:
    """When the service ends nobody is placed again."""
    async with two.pool.submit([submit("a")]) as stream:
        two.holder("a").die("shutting_down")
        with pytest.raises(EngineUnavailableError):
            await stream.take()
    async with two.pool.submit([submit("b")]) as stream:
        two.pool.end_all(EngineUnavailableError("the service is shutting down", "shutting_down"))
        with pytest.raises(EngineUnavailableError, match="shutting down"):
            await stream.take()
    assert two.pool.num_live == 0


async def test_a_draining_engine_finishes_and_takes_no_more(two: Pool) -> None:
    """What it has goes on there, new sequences go elsewhere, and one that crossed the drain is placed again."""
    async with two.pool.submit([submit("a")]) as stream:
        draining = two.holder("a")
        draining.member.drain()
        assert draining.sent[-1] == Drain()
        assert draining.member.state == "draining"
        other = next(engine for engine in two.engines if engine is not draining)
        async with two.pool.submit([submit("b"), submit("c")]):
            assert {"b", "c"} == set(other.member.flights)
        draining.say(output("a", 5, finish="stop"))
        assert tokens(await stream.take()) == [5]
        draining.die()
    assert draining.member.state == "drained"


async def test_a_full_queue_is_tried_elsewhere_first(two: Pool) -> None:
    """Only when every engine refuses is the request refused; a sequence that had begun waits instead."""
    full = {"code": "overloaded", "message": "full"}
    async with two.pool.submit([submit("a")]) as stream:
        first = two.holder("a")
        first.member.dispatch(Rejected(request_id="a", **full))
        second = two.holder("a")
        assert second is not first
        second.member.dispatch(Rejected(request_id="a", **full))
        with pytest.raises(EngineRejectedError, match="full"):
            await stream.take()
    async with two.pool.submit([submit("b")]) as stream:
        first = two.holder("b")
        for token_id in range(4):
            first.say(output("b", token_id))
        first.die()
        second = two.holder("b")
        second.member.dispatch(Rejected(request_id="b", **full))
        assert two.pool.num_waiting == 1
        two.wait(0.1)
        assert second.submitted[-1].output_token_ids == [0, 1, 2, 3]


async def test_a_sequence_goes_where_it_fits(two: Pool) -> None:
    """An engine with a smaller memory is not given what does not fit into it."""
    two.engines[0].die()
    two.engines[0].serve(num_blocks=3)
    async with two.pool.submit([submit(f"{i}", max_tokens=40) for i in range(4)]):
        assert two.engines[0].submitted == []


async def test_totals_outlive_an_engine(two: Pool) -> None:
    """The pool's numbers are sums over engines and lives: a death makes no total smaller and leaves no gauge behind."""
    for engine in two.engines:
        stats = msgspec.structs.replace(NOTHING, num_running=2, blocks_in_use=3, counters={"steps": 10.0})
        engine.member.dispatch(stats)
    assert (two.stats[-1].num_running, two.stats[-1].counters["steps"]) == (4, 20.0)
    two.engines[0].die()
    two.engines[1].member.dispatch(msgspec.structs.replace(NOTHING, num_running=1, counters={"steps": 12.0}))
    assert (two.stats[-1].num_running, two.stats[-1].counters["steps"]) == (1, 22.0)
    assert two.stats[-1].blocks_in_use == 0


async def test_siblings_share_an_engine() -> None:
    """Several choices of one long prompt go where the first of them went: the prompt is then computed once."""
    pool = make_pool(2, LeastTtft())
    prompt = list(range(90)) * 5
    async with pool.pool.submit([submit(f"{i}", prompt=prompt) for i in range(3)]):
        assert len({id(pool.holder(f"{i}")) for i in range(3)}) == 1


async def test_waiting_in_the_queue_of_a_dead_engine_is_no_strike() -> None:
    """Of more sequences than an engine runs at a time, those behind were surely not what killed it."""
    pool = make_pool(1, attempts=1)
    engine = pool.engines[0]
    engine.die()
    engine.serve(max_num_seqs=2)
    async with pool.pool.submit([submit(f"{i}") for i in range(4)]):
        engine.die()
        assert pool.pool.num_given_up == 2
        engine.serve()
        assert set(engine.member.flights) == {"2", "3"}
