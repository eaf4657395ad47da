"""Full batches in which `auto` drafts for some sequences and not for others: the tokens of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import msgspec
import pytest

from draft.config import AutoConfig, NoSpeculation, SpeculationConfig
from draft.registry import lookup_proposers
from draft.roster import Roster
from draft.tree import Draft
from speculation.controller import DraftLengthController
from speculation.cost_model import StepLoad
from speculation.engine import Engine
from speculation.messages import SamplingParams, Submit
from speculation.scheduler import Scheduler, StepPlan
from speculation.simulate import parse_curve
from tests.speculation.running import Run
from tests.tiny_model import tiny_runner

NUM_SEQUENCES = 32
CURVE = "1:5,32:10,40:12,64:40,512:400"
"""Milliseconds by rows: beside 32 sequences a few guesses are cheap, and one for each is not."""
SAMPLINGS = {
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    "sampled": {"temperature": 0.8, "top_p": 0.95, "ignore_eos": True},
    "filtered": {"temperature": 1.1, "min_p": 0.05, "logit_bias": {3: 2.0, 9: -100.0}, "min_tokens": 30},
}


class Timeless(DraftLengthController):
    """Decides by the curve's times: how busy this machine is changes nothing."""

    def note_drafting(self, method: str, drafts: Sequence[Draft], seconds: float) -> None:
        super().note_drafting(method, drafts, 0.0)

    def note_all_drafting(self, seconds: float) -> None:
        super().note_all_drafting(0.0)

    def end(self, load: StepLoad, *, num_tokens: int, seconds: float, is_pure: bool) -> None:
        super().end(load, num_tokens=num_tokens, seconds=self.costs.seconds(load), is_pure=is_pure)


def answers(
    config: SpeculationConfig, sampling: Mapping[str, object], predictions: Mapping[str, list[int]]
) -> dict[str, list[int]]:
    """What 32 sequences say that begin in the same few steps."""
    engine = Engine(
        tiny_runner(num_blocks=600),
        Roster(lookup_proposers(2**12)),
        Timeless(parse_curve(CURVE)),
        model_fingerprint="tiny",
        default_config=NoSpeculation(),
        max_num_seqs=NUM_SEQUENCES,
        max_num_batched_tokens=128,
        max_waiting=NUM_SEQUENCES,
    )
    run, rng = Run(engine), random.Random(4)
    for i in range(NUM_SEQUENCES):
        prompt = [rng.randrange(60) for _ in range(3 + i % 9)]
        params = SamplingParams(seed=i, max_tokens=40, **sampling)  # type: ignore[arg-type]
        request = Submit(request_id=str(i), prompt_token_ids=prompt, sampling=params, speculation=config)
        run.submit(msgspec.structs.replace(request, prediction_token_ids=predictions.get(str(i), [])))
    run.until_idle()
    return run.tokens


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_drafting_for_some_of_a_full_batch_changes_no_token(
    sampling: Mapping[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 32 running, `auto` drafts for some of them in most steps, and all 32 say what they say without it."""
    expected = answers(NoSpeculation(), sampling, {})
    plan, num_drafted = Scheduler.plan, []

    def counted(self: Scheduler, drafts: Mapping[int, Draft]) -> StepPlan:
        planned = plan(self, drafts)
        if len(planned.scheduled) == NUM_SEQUENCES:
            num_drafted.append(sum(1 for scheduled in planned.scheduled if scheduled.draft))
        return planned

    monkeypatch.setattr(Scheduler, "plan", counted)
    # Of every fourth one it is known what it will say: guessing pays there.
    assert answers(AutoConfig(), sampling, {name: expected[name] for name in list(expected)[::4]}) == expected
    assert sum(0 < number < NUM_SEQUENCES for number in num_drafted) >= 10
