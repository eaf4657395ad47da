"""The promise, on real arithmetic: speculation changes no token, whatever the proposer, shapes or neighbours."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

from draft.config import DraftModelConfig, NgramConfig, NoSpeculation, SpeculationConfig
from draft.draft_model import DraftModelProposer
from draft.ngram import NgramProposer
from draft.proposer import DraftContext, Proposer
from draft.roster import Roster
from speculation.controller import DraftLengthController
from speculation.cost_model import StepCostModel
from speculation.engine import Engine
from speculation.messages import SamplingParams, Submit
from target.layout import BatchEntry, lay_out
from target.sampling import SamplingRow, TokenCounts, sample
from target.torch_runner import TorchRunner
from tests.speculation.running import Run
from tests.speculation.scripted import Scripted, bushy
from tests.tiny_model import TINY, tiny_runner

K3 = DraftModelConfig(num_speculative_tokens=3)
TREE = DraftModelConfig(num_speculative_tokens=4, tree_size=12)
AUTO = DraftModelConfig()
NGRAM = NgramConfig(num_speculative_tokens=4, min_n=1, max_n=2)
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=24),
    "sampled": SamplingParams(temperature=0.8, top_p=0.95, seed=1234, max_tokens=24),
    "penalised": SamplingParams(
        temperature=1.1, seed=5, presence_penalty=0.4, frequency_penalty=0.3, repetition_penalty=1.2, max_tokens=24
    ),
    "filtered": SamplingParams(
        temperature=1.2, seed=11, min_p=0.08, logit_bias={3: 1.5, 7: -100.0, 20: 3.0}, max_tokens=24
    ),
    # End of sequence and the stop token are so likely that nothing but `min_tokens` holds them back.
    "held back": SamplingParams(
        temperature=0.9, seed=2, min_tokens=14, logit_bias={60: 6.0, 5: 6.0}, stop_token_ids=(5,), max_tokens=24
    ),
}


@cache
def reference_runner(dtype: torch.dtype) -> TorchRunner:
    return tiny_runner(num_blocks=40, block_size=8, dtype=dtype)


def plain_loop(prompt: tuple[int, ...], params: SamplingParams, dtype: torch.dtype = torch.float64) -> tuple[int, ...]:
    """What the model alone says: everything computed afresh for every token, nothing cached, nothing batched."""
    name = next(name for name, known in SAMPLINGS.items() if known == params)
    return _plain_loop(prompt, name, dtype)


@cache
def _plain_loop(prompt: tuple[int, ...], sampling: str, dtype: torch.dtype) -> tuple[int, ...]:
    params = SAMPLINGS[sampling]
    token_ids = list(prompt)
    stops = (*params.stop_token_ids, *TINY.eos_token_ids)
    while len(token_ids) < len(prompt) + params.max_tokens:
        entry = BatchEntry(0, token_ids, range(1, 40), logits_from=len(token_ids) - 1)
        logits = reference_runner(dtype).forward(lay_out([entry], 8)).logits
        output = token_ids[len(prompt) :]
        counts = TokenCounts(frozenset(prompt), {t: output.count(t) for t in output})
        banned = stops if len(output) < params.min_tokens else ()
        token_ids += sample(logits, [SamplingRow(params, len(token_ids), banned, counts)]).token_ids
        if token_ids[-1] in stops:
            break
    return tuple(token_ids[len(prompt) :])


def truth(context: DraftContext, num_tokens: int) -> list[int]:
    """What the target will say after a context that is a prefix of a plain loop."""
    prompt = tuple(context.token_ids[: context.num_prompt_tokens])
    num_output = len(context.token_ids) - len(prompt)
    return list(plain_loop(prompt, context.sampling)[num_output : num_output + num_tokens])


def proposer_of(name: str, dtype: torch.dtype) -> Proposer:
    """The proposers that can stand for `draft_model`: itself, another model, a random tree around the truth."""
    if name == "bushy":
        return Scripted("bushy", bushy(truth, TINY.vocab_size, random.Random(1)))
    return DraftModelProposer(
        tiny_runner(seed=0 if name == "itself" else 1, dtype=dtype),
        model_fingerprint=name,
        vocab_size=TINY.vocab_size,
        eos_token_ids=TINY.eos_token_ids,
    )


def run_with(
    proposer: str, *, num_blocks: int = 200, block_size: int = 4, budget: int = 64, dtype: torch.dtype = torch.float64
) -> Run:
    engine = Engine(
        tiny_runner(num_blocks=num_blocks, block_size=block_size, dtype=dtype),
        Roster({"ngram": NgramProposer(), "draft_model": proposer_of(proposer, dtype)}),
        DraftLengthController(StepCostModel()),
        model_fingerprint="tiny",
        default_config=NoSpeculation(),
        max_num_seqs=8,
        max_num_batched_tokens=budget,
        max_waiting=100,
    )
    return Run(engine)


def requests_of(params: SamplingParams, configs: list[SpeculationConfig], *, shared: int = 0) -> list[Submit]:
    """One request a config, of different lengths; the first `shared` prompt tokens are the same in all."""
    rng = random.Random(3)
    head = [rng.randrange(60) for _ in range(shared)]
    prompts = [head + [rng.randrange(60) for _ in range(2 + 5 * i % 17)] for i in range(len(configs))]
    return [
        Submit(request_id=str(i), prompt_token_ids=prompt, sampling=params, speculation=config)
        for i, (prompt, config) in enumerate(zip(prompts, configs, strict=True))
    ]


def assert_exact(run: Run, requests: list[Submit], dtype: torch.dtype = torch.float64) -> None:
    for request in requests:
        run.submit(request)
        run.step()
    run.until_idle()
    for request in requests:
        expected = plain_loop(tuple(request.prompt_token_ids), request.sampling, dtype)
        assert tuple(run.tokens[request.request_id]) == expected


@pytest.mark.parametrize("params", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("proposer", ["itself", "another", "bushy"])
@pytest.mark.parametrize(("block_size", "budget"), [(1, 16), (4, 64), (16, 5)])
def test_mixed_batches_say_what_each_says_alone(
    proposer: str, params: SamplingParams, block_size: int, budget: int
) -> None:
    """Plain, looked-up and model-drafted sequences in one batch equal the plain loop, for any block and chunk size."""
    configs: list[SpeculationConfig] = [K3, NoSpeculation(), NGRAM, TREE, AUTO, NGRAM, K3, TREE]
    assert_exact(run_with(proposer, block_size=block_size, budget=budget), requests_of(params, configs))


@pytest.mark.parametrize("params", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("proposer", ["another", "bushy"])
def test_preemption_and_prefix_hits_change_nothing(proposer: str, params: SamplingParams) -> None:
    """In a pool too small for all, with prompts that share a prefix, every sequence still equals the plain loop."""
    run = run_with(proposer, num_blocks=24, block_size=4)
    assert_exact(run, requests_of(params, [K3, NGRAM, TREE, K3, NoSpeculation(), TREE, AUTO], shared=9))
    stats = run.engine.stats()
    assert stats.counters["preemptions"] > 0
    assert stats.counters["cached_tokens"] > 0


@pytest.mark.parametrize("params", SAMPLINGS.values(), ids=SAMPLINGS)
def test_float32_is_exact_too(params: SamplingParams) -> None:
    """In float32, where rounding would show, rows do not depend on their neighbours: the same equality holds."""
    run = run_with("another", num_blocks=40, block_size=4, dtype=torch.float32)
    assert_exact(run, requests_of(params, [K3, NoSpeculation(), NGRAM, TREE, NGRAM, AUTO], shared=5), torch.float32)


@pytest.mark.parametrize("params", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_model_drafting_for_itself_is_never_rejected(params: SamplingParams) -> None:
    """On real weights, at any temperature and under penalties, every guess of the target's own copy is accepted."""
    run = run_with("itself")
    requests = requests_of(params, [K3, K3, K3])
    assert_exact(run, requests)
    for request in requests:
        metrics = run.finished[request.request_id].metrics
        assert metrics is not None
        assert metrics.num_drafts > 0
        if run.finished[request.request_id].finish_reason == "length":
            assert metrics.num_accepted_tokens == metrics.num_draft_tokens
