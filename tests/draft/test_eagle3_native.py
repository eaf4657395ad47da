"""The native head says what the plain torch head says, up to its 8-bit weights."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
import torch

from draft.config import Eagle3Config, NoSpeculation
from draft.eagle3 import Eagle3Proposer
from draft.eagle3_head import ChainWish, Eagle3Architecture, Eagle3Head, FeatureNorm, Level
from draft.eagle3_native import NativeEagle3Head, native_head_obstacle
from draft.proposer import DraftContext, Features
from draft.roster import Roster
from speculation.controller import DraftLengthController
from speculation.cost_model import StepCostModel
from speculation.engine import Engine
from speculation.messages import SamplingParams, Submit
from target.batch import ForwardBatch
from target.layout import BatchEntry, lay_out
from target.native.tiles import Q8
from target.noise import gumbel, noise_keys
from tests.speculation.running import Run
from tests.tiny_head import tiny_architecture, tiny_head_weights
from tests.tiny_model import TINY, tiny_runner

SHAPE = msgspec.structs.replace(TINY, hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2, head_size=32)
"""The native step needs multiples of 32."""


def heads_of(architecture: Eagle3Architecture, num_threads: int) -> tuple[Eagle3Head, NativeEagle3Head]:
    weights = tiny_head_weights(architecture, dtype=torch.float32)
    return (
        Eagle3Head(architecture, weights, num_blocks=8, block_size=16),
        NativeEagle3Head(architecture, weights, num_blocks=8, block_size=16, num_threads=num_threads, body_kind=Q8),
    )


@pytest.mark.skipif(native_head_obstacle(tiny_architecture(SHAPE), 16) is not None, reason="not this processor")
@pytest.mark.parametrize(
    ("feature_norm", "norm_before_residual", "norm_output", "qk_norm", "num_threads"),
    [("none", False, False, False, 1), ("each", True, True, True, 2), ("all", True, False, False, 2)],
)
def test_it_says_what_the_torch_head_says(
    feature_norm: FeatureNorm, norm_before_residual: bool, norm_output: bool, qk_norm: bool, num_threads: int
) -> None:
    """Fusing, a first chain, a chain behind it, and a tree behind both, two sequences at a time."""
    architecture = tiny_architecture(
        SHAPE,
        feature_norm=feature_norm,
        norm_before_residual=norm_before_residual,
        norm_output=norm_output,
        qk_norm=qk_norm,
    )
    plain, native = heads_of(architecture, num_threads)
    generator = torch.Generator().manual_seed(6)
    features = torch.randn(29, 3 * SHAPE.hidden_size, generator=generator) * 3
    hidden = plain.fuse(features)
    assert_close(native.fuse(features), hidden)
    entries = [
        [BatchEntry(0, range(20), [3, 1], logits_from=17), BatchEntry(0, range(7, 16), [2], logits_from=8)],
        [BatchEntry(20, [7, 6], [3, 1]), BatchEntry(9, [9], [2])],
        [BatchEntry(20, [7], [3, 1], logits_from=0), BatchEntry(9, [9, 8], [2], logits_from=0)],
        [
            BatchEntry(20, [7], [3, 1], tree=[5, 6, 7, 8], parents=[-1, -1, 0, 1], logits_from=1),
            BatchEntry(10, [8], [2], tree=[5, 6], parents=[-1, 0], logits_from=0),
        ],
    ]
    for batch in (lay_out(each, 16) for each in entries):
        inputs = torch.cat([hidden, hidden])[: len(batch.token_ids)]
        expected, found = plain.forward(batch, inputs), native.forward(batch, inputs)
        assert_close(found[0], expected[0])
        assert_close(found[1], expected[1])
    native.close()


@pytest.mark.skipif(native_head_obstacle(tiny_architecture(SHAPE), 16) is not None, reason="not this processor")
@pytest.mark.parametrize(("norm_output", "num_threads"), [(False, 1), (True, 2)])
def test_a_chain_in_one_call_is_what_call_after_call_says(norm_output: bool, num_threads: int) -> None:
    """Three sequences, of which one wants fewer levels, one ends at a stop token and one where it becomes unlikely."""
    architecture = tiny_architecture(SHAPE, feature_norm="each", norm_output=norm_output)
    _, native = heads_of(architecture, num_threads)
    features = torch.randn(12, 3 * SHAPE.hidden_size, generator=torch.Generator().manual_seed(2)) * 3
    hidden = native.fuse(features)
    tables = [[3, 1], [2], [5, 4]]

    def first_batch() -> ForwardBatch:
        chains = [range(15), range(4, 7), range(9)]
        return lay_out([BatchEntry(0, c, t, logits_from=len(c) - 1) for c, t in zip(chains, tables, strict=True)], 16)

    rows = [i % 12 for i in range(27)]
    expected: list[list[Level]] = [[], [], []]
    batch, states, at = first_batch(), hidden[rows], [15, 3, 9]
    for _ in range(4):
        logits, states = native.forward(batch, states)
        values, columns = logits.softmax(dim=-1).topk(3, dim=-1)
        for levels, ids, chances in zip(expected, native.target_ids[columns].tolist(), values.tolist(), strict=True):
            levels.append((ids, chances))
        likeliest = [levels[-1][0][0] for levels in expected]
        entries = zip(at, likeliest, tables, strict=True)
        batch = lay_out([BatchEntry(n, [token_id], t, logits_from=0) for n, token_id, t in entries], 16)
        at = [n + 1 for n in at]
    stop = expected[1][1][0][0]
    below = 1.0001 * expected[2][0][1][0] * expected[2][1][1][0]
    wishes = [ChainWish(3, 0.0, ()), ChainWish(4, 0.0, (stop, 10_000)), ChainWish(4, below, (10_001,))]
    num_levels = [3, 1 + next(i for i, level in enumerate(expected[1]) if level[0][0] == stop), 2]
    sources = np.array([i if j % 2 else -1 for j, i in enumerate(rows)], np.int64)
    given = torch.where(torch.from_numpy(sources >= 0)[:, None], torch.nan, hidden[rows])
    fused, found = native.guess(first_batch(), given, features.clone(), sources, wishes, 3)
    assert torch.equal(fused, hidden)
    assert [len(levels) for levels in found] == num_levels
    for levels, wanted in zip(found, expected, strict=True):
        for (ids, chances), (wanted_ids, wanted_chances) in zip(levels, wanted, strict=False):
            assert ids == wanted_ids
            assert chances == pytest.approx(wanted_chances, rel=1e-4)
    assert torch.equal(native.fuse(features), hidden)
    native.close()


@pytest.mark.skipif(native_head_obstacle(tiny_architecture(SHAPE), 16) is not None, reason="not this processor")
def test_guesses_of_requests_that_sample_are_those_that_the_noise_prefers() -> None:
    """At two temperatures beside a greedy sequence, the first is almost always the one with the highest noisy logit."""
    architecture = tiny_architecture(SHAPE)
    _, native = heads_of(architecture, 1)
    temperatures, seeds = (0.8, 0.0, 1.3), (7, 8, 9)
    num_right = 0
    for start in range(40):
        generator = torch.Generator().manual_seed(start)
        features = torch.randn(3, 3 * SHAPE.hidden_size, generator=generator) * 3
        batch = lay_out([BatchEntry(start, [i], [1 + 2 * i, 2 + 2 * i, 7], logits_from=0) for i in range(3)], 16)
        keys = noise_keys(np.array(seeds, np.uint64), np.full(3, start))
        wishes = [ChainWish(1, 0.0, (), t, keys[i : i + 1].tolist() if t else ()) for i, t in enumerate(temperatures)]
        logits, _ = native.forward(batch, native.fuse(features))
        _, found = native.guess(batch, torch.empty(3, SHAPE.hidden_size), features, np.arange(3), wishes, 8)
        noise = gumbel(torch.from_numpy(keys)[:, None], native.target_ids)
        for i, temperature in enumerate(temperatures):
            scores = logits[i].double() / temperature + noise[i] if temperature else logits[i].double()
            (ids, chances), right = found[i][0], int(native.target_ids[scores.argmax()])
            num_right += ids[0] == right
            best = scores.topk(8 if temperature else len(scores)).values
            if ids[0] == right:
                assert chances[0] == pytest.approx(float(best.softmax(0)[0]), rel=0.05)
    assert num_right >= 117
    native.close()


class LevelByLevel:
    """A native head that is not known to draft whole chains."""

    def __init__(self, head: NativeEagle3Head) -> None:
        self.config, self.target_ids, self.kv_pool = head.config, head.target_ids, head.kv_pool
        self.fuse, self.forward = head.fuse, head.forward


@pytest.mark.skipif(native_head_obstacle(tiny_architecture(SHAPE), 16) is not None, reason="not this processor")
@pytest.mark.parametrize("bias", [(), ((5, 6.0), (11, 4.0))])
def test_drafts_are_the_same_in_one_call_and_level_by_level(bias: tuple[tuple[int, float], ...]) -> None:
    """Of two sequences that grow, asked or not, preempted and computed again, with a bias on some tokens or none."""
    architecture = tiny_architecture(SHAPE, feature_norm="each")
    native, other = (heads_of(architecture, 1)[1] for _ in range(2))
    at_once = Eagle3Proposer(native, eos_token_ids=())
    by_level = Eagle3Proposer(LevelByLevel(other), eos_token_ids=())
    rng = random.Random(4)
    texts = [[rng.randrange(SHAPE.vocab_size) for _ in range(60)] for _ in range(2)]
    states = torch.randn(2, 60, 3 * SHAPE.hidden_size, generator=torch.Generator().manual_seed(5))
    ends = [5, 1]
    for proposer in (at_once, by_level):
        for i in range(2):
            proposer.start(i, texts[i][: ends[i]])
    num_drafts = 0
    while max(ends) < 50:
        more = [rng.randrange(1, 4) for _ in range(2)]
        for i in range(2):
            again = rng.choice((0, 0, 2))
            first, last = max(ends[i] - 1 - again, 0), ends[i] + more[i] - 1
            for proposer in (at_once, by_level):
                proposer.commit(i, texts[i][ends[i] : ends[i] + more[i]], Features(first, states[i, first:last]))
            ends[i] += more[i]
        if rng.random() < 0.7:
            greedy = SamplingParams(temperature=0.0, logit_bias=dict(bias))
            config = Eagle3Config(num_speculative_tokens=rng.choice((1, 3)))
            contexts = [DraftContext(i, texts[i][: ends[i]], 1, greedy, config) for i in range(2)]
            drafts = [proposer.propose(contexts, [3, 3]) for proposer in (at_once, by_level)]
            assert [draft.token_ids for draft in drafts[0]] == [draft.token_ids for draft in drafts[1]]
            num_drafts += sum(map(bool, drafts[0]))
    assert num_drafts > 10
    native.close()
    other.close()


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within a few percent of the values' spread: 8-bit weights, keys and values in 16 bits."""
    assert found.shape == expected.shape
    assert not len(found) or float((found - expected).abs().max()) < 0.08 * float(expected.std())


def test_what_it_cannot_compute_has_a_reason() -> None:
    """Sizes that are no multiple of a group and blocks that are no multiple of a tile are refused by name."""
    if native_head_obstacle(tiny_architecture(SHAPE), 16) is None:
        assert "hidden_size is 16" in str(native_head_obstacle(tiny_architecture(TINY), 16))
        assert "block_size is 4" in str(native_head_obstacle(tiny_architecture(SHAPE), 4))


@pytest.mark.skipif(native_head_obstacle(tiny_architecture(SHAPE), 16) is not None, reason="not this processor")
def test_answers_are_the_target_s_with_many_sequences_at_a_time() -> None:
    """Chains and trees of eight sequences, preempted and with shared prefixes, say what plain decoding says."""
    architecture = tiny_architecture(SHAPE, feature_norm="each")
    native = NativeEagle3Head(
        architecture, tiny_head_weights(architecture, dtype=torch.float32), num_blocks=20, block_size=16, num_threads=2
    )
    proposer = Eagle3Proposer(native, eos_token_ids=SHAPE.eos_token_ids, max_catch_up_tokens=16)
    engine = Engine(
        tiny_runner(SHAPE, num_blocks=18, block_size=16),
        Roster({"eagle3": proposer}),
        DraftLengthController(StepCostModel()),
        model_fingerprint="tiny",
        default_config=NoSpeculation(),
        max_num_seqs=8,
        max_num_batched_tokens=48,
        max_waiting=100,
    )
    configs = [
        Eagle3Config(num_speculative_tokens=3),
        Eagle3Config(num_speculative_tokens=4, tree_size=12),
        Eagle3Config(),
    ]
    answers: dict[str, list[list[int]]] = {"plain": [], "drafted": []}
    for name, found in answers.items():
        run = Run(engine)
        for i in range(8):
            sampling = SamplingParams(temperature=float(i % 2), seed=i, max_tokens=40)
            config = NoSpeculation() if name == "plain" else configs[i % 3]
            prompt = [*range(20), *range(i, 12)]
            run.submit(Submit(request_id=str(i), prompt_token_ids=prompt, sampling=sampling, speculation=config))
        run.until_idle()
        found += [run.tokens[str(i)] for i in range(8)]
    assert answers["plain"] == answers["drafted"]
    assert engine.stats().counters["draft_tokens"] > 100
    assert engine.stats().counters["preemptions"] > 0
    assert proposer.pool.num_in_use == 0
    native.close()
