"""Every method of a service in one batch, each sequence another one: chains, trees and sizes left to the controller."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from draft.config import (
    AutoConfig,
    DraftModelConfig,
    Eagle3Config,
    FirstConfig,
    MedusaConfig,
    NgramConfig,
    NoSpeculation,
    PredictionConfig,
    SpeculationConfig,
    SuffixConfig,
    method_of,
)
from draft.draft_model import DraftModelProposer
from draft.eagle3 import Eagle3Proposer
from draft.medusa import MedusaProposer
from draft.medusa_heads import MedusaHeads
from draft.proposer import Proposer
from draft.registry import lookup_proposers
from draft.roster import Roster
from speculation.controller import DraftLengthController
from speculation.cost_model import StepCostModel
from speculation.engine import Engine
from speculation.messages import SamplingParams, Submit
from tests.speculation.running import Run
from tests.speculation.test_exactness import SAMPLINGS, assert_exact, plain_loop, requests_of
from tests.tiny_head import tiny_head
from tests.tiny_medusa import tiny_tables, write_tiny_medusa
from tests.tiny_model import TINY, tiny_runner

CONFIGS: list[SpeculationConfig] = [
    NoSpeculation(),
    NgramConfig(num_speculative_tokens=4, min_n=1, max_n=2),
    SuffixConfig(num_speculative_tokens=4),
    SuffixConfig(num_speculative_tokens=5, tree_size=12, min_confidence=0.0),
    PredictionConfig(num_speculative_tokens=6),
    DraftModelConfig(num_speculative_tokens=3),
    DraftModelConfig(num_speculative_tokens=4, tree_size=12),
    MedusaConfig(num_speculative_tokens=3),
    MedusaConfig(num_speculative_tokens=4, tree_size=12),
    Eagle3Config(num_speculative_tokens=3),
    Eagle3Config(num_speculative_tokens=4, tree_size=12),
    FirstConfig(proposers=(NgramConfig(num_speculative_tokens=3), Eagle3Config(num_speculative_tokens=2, tree_size=6))),
    AutoConfig(),
]


@pytest.fixture(scope="module")
def medusa(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_medusa(tmp_path_factory.mktemp("medusa"))


def run_with(medusa: Path, *, num_blocks: int, max_num_seqs: int) -> Run:
    heads = MedusaHeads(medusa, tiny_tables(), torch.float64, torch.device("cpu"))
    models: list[Proposer] = [
        DraftModelProposer(
            tiny_runner(seed=1, num_blocks=200),
            model_fingerprint="draft",
            vocab_size=TINY.vocab_size,
            eos_token_ids=TINY.eos_token_ids,
        ),
        MedusaProposer(heads, eos_token_ids=TINY.eos_token_ids),
        Eagle3Proposer(tiny_head(num_blocks=200), eos_token_ids=TINY.eos_token_ids),
    ]
    engine = Engine(
        tiny_runner(num_blocks=num_blocks),
        Roster(lookup_proposers(2**12) | {proposer.name: proposer for proposer in models}),
        DraftLengthController(StepCostModel()),
        model_fingerprint="tiny",
        default_config=NoSpeculation(),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=64,
        max_waiting=100,
    )
    return Run(engine)


def with_prediction(request: Submit) -> Submit:
    """What will be said, with one wrong token."""
    said = list(plain_loop(tuple(request.prompt_token_ids), request.sampling))
    said[len(said) // 2] ^= 1
    return msgspec.structs.replace(request, prediction_token_ids=said)


@pytest.mark.parametrize("params", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize(
    ("num_blocks", "max_num_seqs"), [(200, 1), (200, 16), (40, 16)], ids=["alone", "together", "preempted"]
)
def test_every_method_gives_the_plain_answer(
    medusa: Path, params: SamplingParams, num_blocks: int, max_num_seqs: int
) -> None:
    """One at a time, all together, and in a pool too small for all with shared prefixes: the plain loop's tokens."""
    run = run_with(medusa, num_blocks=num_blocks, max_num_seqs=max_num_seqs)
    requests = [
        with_prediction(request) if isinstance(request.speculation, PredictionConfig) else request
        for request in requests_of(params, CONFIGS, shared=9)
    ]
    assert_exact(run, requests)
    counters = run.engine.stats().counters
    assert (counters["preemptions"] > 0) == (num_blocks == 40)
    assert counters["cached_tokens"] > 0
    methods = {method_of(config) for config in CONFIGS} - {"none", "first", "auto"}
    assert all(counters[f"drafts:{method}"] > 0 for method in methods)
