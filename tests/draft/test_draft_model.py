"""The draft model: right every time for itself, its cache never out of step, and clear when it cannot draft."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from draft.config import DraftModelConfig, NgramConfig
from draft.draft_model import DraftModelProposer
from draft.proposer import DraftContext
from speculation.messages import SamplingParams, Submit
from tests.speculation.running import SAMPLINGS, Run, engine_with, plain_loop, request_of
from tests.speculation.token_runner import VOCAB_SIZE, TokenRunner


class BlurredRunner(TokenRunner):
    """A model that is right in part: the target's logits, and something else on top of them."""

    @staticmethod
    def logits(visible: Sequence[tuple[int, int]]) -> torch.Tensor:
        others = [((token + 1) % VOCAB_SIZE, position) for token, position in visible]
        return TokenRunner.logits(visible) + 0.8 * TokenRunner.logits(others)


K4 = DraftModelConfig(num_speculative_tokens=4)
TREE = DraftModelConfig(num_speculative_tokens=4, tree_size=14)


def proposer_with(
    num_blocks: int = 200, *, max_model_len: int = 512, max_catch_up_tokens: int = 512
) -> DraftModelProposer:
    return DraftModelProposer(
        TokenRunner(num_blocks, max_model_len=max_model_len),
        model_fingerprint="draft",
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(),
        max_catch_up_tokens=max_catch_up_tokens,
    )


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_model_drafting_for_itself_is_always_accepted(sampling: dict[str, object]) -> None:
    """With the target's own weights every guess is accepted, at any temperature, under any filter and penalty."""
    proposer = proposer_with()
    run = Run(engine_with(proposer))
    requests = [request_of(str(i), [i, 2, 3] * (i + 1), K4, **sampling) for i in range(4)]
    for request in requests:
        run.submit(request)
    run.until_idle()
    for request in requests:
        assert run.tokens[request.request_id] == plain_loop(request)
        metrics = run.finished[request.request_id].metrics
        assert metrics is not None
        assert metrics.num_drafts > 0
        # Guesses behind a stop token are dropped with it; all others were accepted.
        rejected = metrics.num_draft_tokens - metrics.num_accepted_tokens
        assert rejected == 0 or run.finished[request.request_id].finish_reason == "stop"
    assert proposer.pool.num_in_use == 0
    proposer.pool.check()


@pytest.mark.parametrize("catch_up", [3, 512])
def test_its_cache_keeps_step_through_every_disturbance(catch_up: int) -> None:
    """Preemptions, mixed methods, prefix hits and chunked catch-up leave every answer as it would be alone."""
    rng = random.Random(2)
    proposer = proposer_with(40, max_catch_up_tokens=catch_up)
    run = Run(engine_with(proposer, num_blocks=16))
    requests = []
    for i in range(8):
        prompt = [1, 2, 3, 4, 5] * 2 + [rng.randrange(VOCAB_SIZE) for _ in range(i)]
        config = NgramConfig(num_speculative_tokens=3) if i % 4 == 3 else TREE if i % 2 else K4
        requests.append(request_of(str(i), prompt, config, temperature=float(i % 2), seed=i, max_tokens=25))
    for request in requests:
        run.submit(request)
        run.step()
    run.until_idle()
    for request in requests:
        assert run.tokens[request.request_id] == plain_loop(request)
    assert run.engine.stats().counters["preemptions"] > 0
    assert proposer.pool.num_in_use == 0


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_its_cache_says_what_everything_computed_afresh_says(sampling: dict[str, object]) -> None:
    """Draft for draft, behind chains and behind trees, a model that goes along guesses what a fresh one would."""
    rng = random.Random(4)
    along = proposer_with()
    params = request_of("a", [1], **sampling).sampling
    token_ids = [rng.randrange(VOCAB_SIZE) for _ in range(7)]
    along.start(0, token_ids)
    for step in range(40):
        context = DraftContext(0, list(token_ids), 7, params, TREE if step % 3 else K4)
        (draft,) = along.propose([context], [14 if step % 3 else 4])
        fresh = proposer_with()
        fresh.start(0, token_ids)
        assert fresh.propose([context], [14 if step % 3 else 4]) == [draft]
        # Now the first path, now another one, now something that was not guessed.
        path = [node for node, parent in enumerate(draft.parents) if parent == -1][: 1 + step % 2]
        committed = [draft.token_ids[path[-1]], rng.randrange(VOCAB_SIZE)] if step % 4 else [rng.randrange(VOCAB_SIZE)]
        along.commit(0, committed, None)
        token_ids += committed


def test_it_branches_where_it_is_unsure_and_stops_where_nothing_pays() -> None:
    """A tree has siblings; paths that are less likely than what pays are not followed, the first guess excepted."""
    proposer = proposer_with()
    proposer.start(0, [1, 2, 3])
    params = SamplingParams(temperature=0.0)
    sizes = []
    for least in (0.0, 0.1, 0.3, 0.999):
        context = DraftContext(0, [1, 2, 3], 3, params, DraftModelConfig(), min_confidence=least)
        (draft,) = proposer.propose([context], [20])
        assert draft.confidences is not None
        assert min(draft.confidences[1:], default=1.0) >= least
        sizes.append(len(draft))
        if not least:
            assert not draft.is_chain
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 20
    assert sizes[-1] == 1


def test_trees_are_right_more_often_than_chains() -> None:
    """A model that is wrong now and then, asked for as many levels, has more of the target's tokens in a tree."""
    lengths = []
    for size in ("auto", 30):
        proposer = DraftModelProposer(
            BlurredRunner(200), model_fingerprint="draft", vocab_size=VOCAB_SIZE, eos_token_ids=()
        )
        run = Run(engine_with(proposer))
        request = request_of("a", [1, 2, 3], DraftModelConfig(num_speculative_tokens=3, tree_size=size), max_tokens=100)
        run.submit(request)
        run.until_idle()
        assert run.tokens["a"] == plain_loop(request)
        metrics = run.finished["a"].metrics
        assert metrics is not None
        lengths.append(metrics.num_accepted_tokens / metrics.num_drafts)
    assert lengths[1] > 1.3 * lengths[0]


def test_sequences_longer_than_its_context_are_skipped_alone() -> None:
    """A sequence that outgrows the draft model's context is served plainly, with the reason counted."""
    run = Run(engine_with(proposer_with(max_model_len=16)))
    request = request_of("a", [1, 2, 3], K4, max_tokens=30)
    run.submit(request)
    run.until_idle()
    assert run.tokens["a"] == plain_loop(request)
    metrics = run.finished["a"].metrics
    assert metrics is not None
    assert metrics.num_accepted_tokens > 5
    assert metrics.skipped_drafts["too_long"] > 5


def test_a_pool_too_small_drafts_for_whom_it_can() -> None:
    """Without blocks of its own a draft is skipped as no_blocks, and the answer stands."""
    run = Run(engine_with(proposer_with(6)))
    requests = [request_of(str(i), [i, 2, 3], K4, max_tokens=20) for i in range(3)]
    for request in requests:
        run.submit(request)
    run.until_idle()
    reasons = [metrics.skipped_drafts for r in requests if (metrics := run.finished[r.request_id].metrics) is not None]
    assert any("no_blocks" in skipped for skipped in reasons)
    assert all(run.tokens[r.request_id] == plain_loop(r) for r in requests)


def test_verbs_out_of_order_are_refused() -> None:
    """Starting twice, and proposing, committing or finishing what was not started, raise."""
    proposer = proposer_with()
    proposer.start(1, [1, 2])
    with pytest.raises(ValueError, match="started already"):
        proposer.start(1, [1, 2])
    context = DraftContext(2, [1, 2], 2, SamplingParams(), K4)
    for verb in (
        lambda: proposer.propose([context], [2]),
        lambda: proposer.commit(2, [1], None),
        lambda: proposer.finish(2),
    ):
        with pytest.raises(ValueError, match="not started"):
            verb()


def test_a_resumed_request_is_drafted_from_its_whole_text() -> None:
    """A request that brings output tokens along is drafted behind them."""
    whole = request_of("a", [1, 2, 3], K4, max_tokens=20)
    expected = plain_loop(whole)
    run = Run(engine_with(proposer_with()))
    run.submit(
        Submit(
            request_id="b",
            prompt_token_ids=[1, 2, 3],
            sampling=whole.sampling,
            speculation=K4,
            output_token_ids=expected[:8],
        )
    )
    run.until_idle()
    assert run.tokens["b"] == expected[8:]
