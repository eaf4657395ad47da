"""The engine on a model of integers: counts of steps, exactness under every disturbance, and no block left behind."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest
import torch

from cache_store.hashing import root_hash
from draft.config import DraftModelConfig, NgramConfig, NoSpeculation
from draft.proposer import DraftContext
from draft.tree import Draft
from speculation.messages import SamplingParams, Submit
from tests.speculation.running import SAMPLINGS, SCRIPTED, Run, engine_with, plain_loop, request_of, truth
from tests.speculation.scripted import Scripted, bushy, coin, liar, oracle
from tests.speculation.token_runner import EOS, VOCAB_SIZE, TokenRunner


@pytest.mark.parametrize("k", [1, 2, 4, 7])
@pytest.mark.parametrize("n", [1, 2, 9, 20])
def test_oracle_needs_the_fewest_steps(k: int, n: int) -> None:
    """An oracle with k guesses yields n tokens in 1 + ceil((n - 1) / (k + 1)) steps."""
    engine = engine_with(Scripted("oracle", oracle(truth)))
    run = Run(engine)
    request = request_of("a", [1, 2, 3], DraftModelConfig(num_speculative_tokens=k), max_tokens=n)
    run.submit(request)
    run.until_idle()
    assert run.tokens["a"] == plain_loop(request)
    assert engine.stats().counters["steps"] == 1 + -(-(n - 1) // (k + 1))


def test_liar_costs_no_token() -> None:
    """A liar's guesses are all rejected and n tokens take n steps, as without speculation."""
    engine = engine_with(Scripted("liar", liar(truth, VOCAB_SIZE)))
    run = Run(engine)
    request = request_of("a", [1, 2, 3], SCRIPTED, max_tokens=15)
    run.submit(request)
    run.until_idle()
    assert run.tokens["a"] == plain_loop(request)
    assert engine.stats().counters["steps"] == 15
    metrics = run.finished["a"].metrics
    assert metrics is not None
    assert metrics.num_accepted_tokens == 0
    assert metrics.accepted_histogram == [13]
    assert metrics.skipped_drafts == {"last_token": 1}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("shape", ["oracle", "liar", "coin", "bushy", "ngram"])
@pytest.mark.parametrize(("block_size", "budget"), [(1, 3), (4, 64), (16, 7)])
def test_every_proposer_gives_the_plain_loops_tokens(
    shape: str, sampling: dict[str, object], block_size: int, budget: int
) -> None:
    """Six sequences with drafts of every shape say what each says alone and undrafted, for any block and chunk size."""
    rng = random.Random(5)
    scripts: dict[str, Callable[[DraftContext, int], Draft]] = {
        "oracle": oracle(truth),
        "liar": liar(truth, VOCAB_SIZE),
        "coin": coin(truth, VOCAB_SIZE, rng),
        "bushy": bushy(truth, VOCAB_SIZE, rng),
    }
    proposer = Scripted(shape, scripts[shape]) if shape in scripts else None
    config = NgramConfig(num_speculative_tokens=5) if shape == "ngram" else SCRIPTED
    run = Run(engine_with(proposer, block_size=block_size, num_blocks=400, max_num_batched_tokens=budget))
    requests = [
        request_of(str(i), [rng.randrange(VOCAB_SIZE) for _ in range(1 + 3 * i)], config if i % 3 else None, **sampling)
        for i in range(6)
    ]
    for request in requests:
        run.submit(request)
        run.step()
    run.until_idle()
    for request in requests:
        assert run.tokens[request.request_id] == plain_loop(request), request
    if proposer is not None:
        assert proposer.drafts
        assert proposer.live == {}


@pytest.mark.parametrize("shape", ["bushy", "coin"])
def test_preemption_changes_no_token(shape: str) -> None:
    """In a pool too small for all, sequences are preempted and resumed, and still say what each says alone."""
    rng = random.Random(11)
    script = (bushy if shape == "bushy" else coin)(truth, VOCAB_SIZE, rng)
    run = Run(engine_with(Scripted(shape, script), num_blocks=14, block_size=4))
    requests = [
        request_of(
            str(i), [rng.randrange(VOCAB_SIZE) for _ in range(6)], SCRIPTED, temperature=1.0, seed=i, max_tokens=28
        )
        for i in range(6)
    ]
    for request in requests:
        run.submit(request)
    run.until_idle()
    assert run.engine.stats().counters["preemptions"] > 0
    for request in requests:
        assert run.tokens[request.request_id] == plain_loop(request)


def test_streams_go_on_while_a_long_prompt_is_computed() -> None:
    """While chunks of a more urgent prompt are computed, every decoding sequence yields a token in every step."""
    run = Run(engine_with(max_num_batched_tokens=8))
    streams = [request_of(name, [i, 1, 2], temperature=1.0, seed=i, max_tokens=30) for i, name in enumerate("abc")]
    for request in streams:
        run.submit(request)
        run.step()
    run.step()
    prompt = request_of("long", [i % VOCAB_SIZE for i in range(61)], max_tokens=4)
    prompt = msgspec.structs.replace(prompt, priority=-1)
    run.submit(prompt)
    for num_chunks in range(1, 20):
        before = {request.request_id: len(run.tokens[request.request_id]) for request in streams}
        run.step()
        assert all(len(run.tokens[name]) == num_tokens + 1 for name, num_tokens in before.items()), num_chunks
        if run.tokens["long"]:
            break
    # Five rows a step are left of eight: 13 chunks of 61 tokens.
    assert num_chunks == 13
    run.until_idle()
    for request in [*streams, prompt]:
        assert run.tokens[request.request_id] == plain_loop(request)


def test_drafts_are_trimmed_before_anybody_is_preempted() -> None:
    """Guesses that do not fit are dropped with a reason; the sequences themselves go on."""
    run = Run(engine_with(Scripted("oracle", oracle(truth)), num_blocks=9, block_size=4))
    requests = [request_of(str(i), [i, 1, 2], SCRIPTED, max_tokens=13) for i in range(2)]
    for request in requests:
        run.submit(request)
    run.until_idle()
    stats = run.engine.stats()
    assert stats.counters["preemptions"] == 0
    assert [run.tokens[r.request_id] for r in requests] == [plain_loop(r) for r in requests]


def test_prefix_hit_serves_the_same_tokens_with_fewer_computed() -> None:
    """The second request with the same long prompt computes the last block alone, and says the same."""
    run = Run(engine_with())
    prompt = [i * 7 % VOCAB_SIZE for i in range(22)]
    for name in ("a", "b"):
        run.submit(request_of(name, prompt))
        run.until_idle()
    assert run.tokens["a"] == run.tokens["b"] == plain_loop(request_of("c", prompt))
    metrics = run.finished["b"].metrics
    assert metrics is not None
    assert metrics.num_cached_tokens == 20


def test_prefix_hits_leave_a_token_to_compute() -> None:
    """A prompt that is cached whole still computes its last block, whose logits are needed."""
    run = Run(engine_with())
    prompt = [i * 7 % VOCAB_SIZE for i in range(20)]
    for name in ("a", "b"):
        run.submit(request_of(name, prompt))
        run.until_idle()
    assert run.tokens["a"] == run.tokens["b"] == plain_loop(request_of("c", prompt))
    metrics = run.finished["b"].metrics
    assert metrics is not None
    assert metrics.num_cached_tokens == 16


def test_salts_do_not_share_blocks() -> None:
    """A prompt cached under one salt is not found under another."""
    run = Run(engine_with())
    prompt = [i * 7 % VOCAB_SIZE for i in range(22)]
    for name, salt in (("a", "one"), ("b", "two"), ("c", "one")):
        request = Submit(
            request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(temperature=0.0), cache_salt=salt
        )
        run.submit(request)
        run.until_idle()
    cached = [m.num_cached_tokens for name in "abc" if (m := run.finished[name].metrics) is not None]
    assert cached == [0, 0, 20]


def test_draft_tokens_are_never_hashed() -> None:
    """After rejected guesses no block of the prefix index holds a token the target did not say."""
    engine = engine_with(Scripted("liar", liar(truth, VOCAB_SIZE)), block_size=2)
    run = Run(engine)
    request = request_of("a", [1, 2, 3], SCRIPTED, max_tokens=12)
    run.submit(request)
    run.until_idle()
    said = [*request.prompt_token_ids, *plain_loop(request)]
    match = engine.pool.match(root_hash("integers", ""), said, len(said))
    assert match.num_tokens == (len(said) - 1) // 2 * 2
    assert engine.pool.num_cached == match.num_tokens // 2


def test_abort_frees_blocks_at_once() -> None:
    """An aborted sequence holds no block when abort returns, running or waiting, and the others are undisturbed."""
    run = Run(engine_with(Scripted("oracle", oracle(truth)), max_num_seqs=2))
    requests = [request_of(str(i), [i, 1, 2], SCRIPTED, max_tokens=30) for i in range(4)]
    for request in requests:
        run.submit(request)
    run.step()
    for name in ("0", "3"):
        output = run.engine.abort(name)
        assert output is not None
        assert output.finish_reason == "abort"
        run.engine.check()
    assert run.engine.abort("0") is None
    run.until_idle()
    assert [run.tokens[str(i)] for i in (1, 2)] == [plain_loop(requests[i]) for i in (1, 2)]


def test_more_urgent_requests_displace_less_urgent_ones() -> None:
    """A lower priority number takes the place of a running less urgent sequence, which resumes later."""
    run = Run(engine_with(max_num_seqs=1))
    slow = request_of("slow", [1, 2, 3], max_tokens=20)
    urgent = Submit(
        request_id="urgent",
        prompt_token_ids=[4, 5],
        sampling=SamplingParams(temperature=0.0, max_tokens=3),
        priority=-1,
    )
    run.submit(slow)
    run.step()
    run.submit(urgent)
    for _ in range(3):
        run.step()
    assert "urgent" in run.finished
    run.until_idle()
    assert run.tokens["slow"] == plain_loop(slow)


def test_resumed_request_goes_on_where_it_was() -> None:
    """A request submitted with the tokens it already has yields exactly the rest of the undisturbed answer."""
    whole = request_of("a", [1, 2, 3], temperature=1.0, seed=4, max_tokens=18, frequency_penalty=0.5)
    expected = plain_loop(whole)
    run = Run(engine_with())
    resumed = Submit(request_id="b", prompt_token_ids=[1, 2, 3], sampling=whole.sampling, output_token_ids=expected[:7])
    run.submit(resumed)
    run.until_idle()
    assert run.tokens["b"] == expected[7:]


def test_eos_ends_a_sequence_in_the_middle_of_a_draft() -> None:
    """Accepted tokens behind the end-of-sequence token are dropped, and the reason is stop."""
    run = Run(engine_with(Scripted("oracle", oracle(truth)), eos=True))
    request = request_of("a", [1, 2, 3], SCRIPTED, temperature=1.5, seed=1, max_tokens=200)
    expected = plain_loop(request, eos=True)
    assert expected[-1] == EOS
    run.submit(request)
    run.until_idle()
    assert run.tokens["a"] == expected
    assert run.finished["a"].finish_reason == "stop"
    assert run.finished["a"].stop_token_id == EOS


def test_logprobs_are_the_targets_own() -> None:
    """Every emitted token, guessed or not, carries its logprob and rank under the unmodified target distribution."""
    run = Run(engine_with(Scripted("coin", coin(truth, VOCAB_SIZE, random.Random(3)))))
    request = request_of("a", [1, 2], SCRIPTED, temperature=0.7, seed=3, logprobs=2, max_tokens=12)
    assert run.engine.submit(request) is None
    tokens: list[int] = []
    while run.engine.has_work:
        for output in run.engine.step():
            assert output.logprobs is not None
            for token, entry in zip(output.token_ids, output.logprobs, strict=True):
                seen = [1, 2, *tokens]
                expected = TokenRunner.logits(list(zip(seen, range(len(seen)), strict=True))).log_softmax(-1)
                assert entry.logprob == pytest.approx(float(expected[token]), abs=1e-6)
                assert entry.rank == int((expected > expected[token]).sum()) + 1
                assert entry.top_token_ids == torch.topk(expected, 2).indices.tolist()
                tokens.append(token)
    assert tokens == plain_loop(request)


@pytest.mark.parametrize("budget", [2, 64])
def test_prompt_logprobs_cover_the_prompt(budget: int) -> None:
    """A scored prompt yields one entry for every prompt token but the first, chunked or not, cached or not."""
    run = Run(engine_with(max_num_batched_tokens=budget))
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    expected = [
        float(TokenRunner.logits(list(zip(prompt[:i], range(i), strict=True))).log_softmax(-1)[prompt[i]])
        for i in range(1, len(prompt))
    ]
    for name, max_tokens in (("a", 0), ("b", 3)):
        request = Submit(
            request_id=name,
            prompt_token_ids=prompt,
            sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens),
            prompt_logprobs=1,
        )
        assert run.engine.submit(request) is None
        outputs = []
        while run.engine.has_work:
            outputs += run.engine.step()
        entries = [entry for output in outputs for entry in output.prompt_logprobs or []]
        assert [entry.logprob for entry in entries] == pytest.approx(expected, abs=1e-6)
        assert sum(len(output.token_ids) for output in outputs) == max_tokens
        assert outputs[-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("request_", "param", "says"),
    [
        (request_of("x", []), "prompt", "no tokens"),
        (request_of("x", [1, VOCAB_SIZE]), "prompt", "between 0 and 10"),
        (request_of("x", [1], max_tokens=100000), "max_tokens", "exceed the context of 252"),
        (request_of("x", [1], DraftModelConfig()), "speculation.method", "'draft_model' is not served here"),
    ],
)
def test_refusals_name_the_field(request_: Submit, param: str, says: str) -> None:
    """What an engine cannot serve is refused with the field and what would be right, and nothing is kept."""
    engine = engine_with()
    refusal = engine.submit(request_)
    assert refusal is not None
    assert (refusal.code, refusal.param) == ("invalid", param)
    assert says in refusal.message
    assert not engine.has_work


def test_full_queue_refuses() -> None:
    """More waiting requests than allowed are refused as overload, not as a mistake of the client."""
    engine = engine_with(max_waiting=1)
    assert engine.submit(request_of("a", [1])) is None
    refusal = engine.submit(request_of("b", [1]))
    assert refusal is not None
    assert refusal.code == "overloaded"


def test_two_hundred_requests_with_random_aborts_leave_no_block() -> None:
    """200 mixed requests in 64 blocks, some aborted at random: the rest are exact and every block comes back."""
    rng = random.Random(17)
    run = Run(
        engine_with(Scripted("bushy", bushy(truth, VOCAB_SIZE, rng)), num_blocks=64, block_size=4, max_waiting=300)
    )
    requests = []
    for i in range(200):
        config = rng.choice([None, SCRIPTED, NgramConfig(num_speculative_tokens=3), NoSpeculation()])
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 40))]
        requests.append(
            request_of(
                str(i), prompt, config, temperature=rng.choice([0.0, 1.0]), seed=i, max_tokens=rng.randrange(1, 40)
            )
        )
    aborted = set()
    for request in requests:
        run.submit(request)
        if rng.random() < 0.7:
            run.step()
        if rng.random() < 0.3:
            name = str(rng.randrange(len(run.tokens)))
            if run.engine.abort(name) is not None:
                aborted.add(name)
    run.until_idle(20000)
    assert aborted
    for request in requests:
        if request.request_id not in aborted:
            assert run.tokens[request.request_id] == plain_loop(request)
    assert run.engine.pool.num_free + run.engine.pool.num_cached == 63


def skipped_of(run: Run, name: str) -> dict[str, int]:
    """Why a finished request had steps without a draft."""
    metrics = run.finished[name].metrics
    assert metrics is not None
    return metrics.skipped_drafts


def test_guesses_that_do_not_fit_are_counted_by_reason() -> None:
    """A token budget spent on committed tokens, a pool without a free block, plain decoding, and the last token."""
    script = oracle(truth)
    tight = Run(engine_with(Scripted("oracle", script), max_num_batched_tokens=2))
    full = Run(engine_with(Scripted("oracle", script), num_blocks=8, block_size=1))
    for run in (tight, full):
        for number, prompt in enumerate(([1, 2], [2, 3])):
            run.submit(request_of(str(number), prompt, SCRIPTED, max_tokens=5))
        run.submit(request_of("plain", [3], NoSpeculation(), max_tokens=2))
        run.until_idle()
    for run, reason in ((tight, "token_budget"), (full, "no_blocks")):
        counted = [skipped_of(run, name).get(reason, 0) for name in ("0", "1", "plain")]
        assert run.engine.stats().skipped_drafts[reason] == sum(counted) > 0
        assert skipped_of(run, "plain").keys() <= {"disabled"}
    assert skipped_of(tight, "plain")["disabled"] > 0
    assert tight.engine.stats().skipped_drafts["last_token"] > 0


def test_saved_seconds_are_those_of_the_requests_together() -> None:
    """An oracle saves time by what steps cost, plain decoding none, a liar loses some; totals count both apart."""
    engine = engine_with(Scripted("oracle", oracle(truth)))
    run = Run(engine)
    run.submit(request_of("right", [1, 2, 3], SCRIPTED, max_tokens=40))
    run.until_idle()
    run.submit(request_of("plain", [1, 2, 3], NoSpeculation(), max_tokens=40))
    run.until_idle()
    other = engine_with(Scripted("liar", liar(truth, VOCAB_SIZE)))
    wrong = Run(other)
    wrong.submit(request_of("wrong", [1, 2, 3], SCRIPTED, max_tokens=40))
    wrong.until_idle()
    saved = {}
    for each in (run, wrong):
        for name, output in each.finished.items():
            assert output.metrics is not None
            saved[name] = output.metrics.saved_seconds
    assert saved["wrong"] < 0.0 == saved["plain"] < saved["right"]
    totals = [each.stats().counters for each in (engine, other)]
    assert [(each["saved_seconds"], each["lost_seconds"]) for each in totals] == [
        (saved["right"], 0.0),
        (0.0, -saved["wrong"]),
    ]
