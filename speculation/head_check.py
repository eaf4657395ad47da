"""Whether a loaded head fits its target: how often its first guess is right on a few sentences."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from draft.config import SpeculationConfig
from draft.proposer import Proposer
from draft.roster import Roster
from speculation.controller import DraftLengthController
from speculation.cost_model import StepCostModel
from speculation.engine import Engine
from speculation.messages import SamplingParams, Submit
from target.runner import Runner

SENTENCES = (
    "The history of the city goes back to",
    "To make a good soup, first",
    "Water boils at a lower temperature on a mountain because",
    "Dear Sir or Madam, I am writing to",
)
NUM_TOKENS = 24
NEAR_CHANCE = 0.08
"""A head that reads the wrong layers is right now and then; one that fits, on a fifth of all tokens and more."""


def first_guess_acceptance(
    runner: Runner, proposer: Proposer, config: SpeculationConfig, model_dir: Path
) -> float | None:
    """The share of first guesses that the target accepts behind a few sentences; None where nothing was guessed.

    `config` names the proposer's method and drafts one token. Uses the runner's KV pool, so it must come before there
    is an engine; leaves nothing behind. Takes `NUM_TOKENS` steps.
    """
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    engine = Engine(
        runner,
        Roster({proposer.name: proposer}),
        DraftLengthController(StepCostModel()),
        model_fingerprint="check",
        default_config=config,
        max_num_seqs=len(SENTENCES),
        max_num_batched_tokens=256,
        max_waiting=len(SENTENCES),
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for number, sentence in enumerate(SENTENCES):
        token_ids = tokenizer.encode(sentence).ids
        engine.submit(Submit(request_id=str(number), prompt_token_ids=token_ids, sampling=sampling, cache_salt="check"))
    num_drafts = num_accepted = 0
    while engine.has_work:
        for output in engine.step():
            if output.metrics is not None:
                num_drafts += output.metrics.num_drafts
                num_accepted += output.metrics.num_accepted_tokens
    return num_accepted / num_drafts if num_drafts else None


def misfit_warning(name: str, acceptance: float | None) -> str | None:
    """What to tell whoever loaded a head with this acceptance; None if it fits."""
    if acceptance is None or acceptance >= NEAR_CHANCE:
        return None
    return (
        f"{name}: {acceptance:.0%} of its first guesses are right, which is little more than chance. Is it made for "
        "this target? Some EAGLE-3 heads count layers differently: try shifting the layers it reads by 1 or -1"
    )
