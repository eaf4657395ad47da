"""Running an engine on a made-up target, and what it must say: the plain loop."""

from __future__ import annotations

from draft.config import DraftModelConfig, NoSpeculation
from draft.ngram import NgramProposer
from draft.proposer import DraftContext, Proposer
from draft.roster import Roster
from speculation.controller import DraftLengthController
from speculation.cost_model import StepCostModel
from speculation.engine import Engine
from speculation.messages import SamplingParams, SequenceOutput, Submit
from target.sampling import SamplingRow, TokenCounts, sample
from tests.speculation.token_runner import EOS, TokenRunner

SAMPLINGS: dict[str, dict[str, object]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "seed": 7},
    "filtered": {"temperature": 1.3, "seed": 3, "top_p": 0.8, "top_k": 6, "min_p": 0.05},
    "penalties": {"temperature": 0.8, "seed": 9, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    "repetition": {"repetition_penalty": 1.7},
    "bias": {"temperature": 1.0, "seed": 2, "logit_bias": {3: 2.5, 4: -100.0}},
    "stops": {"temperature": 1.0, "seed": 5, "stop_token_ids": (4,), "min_tokens": 6, "max_tokens": 40},
}
SCRIPTED = DraftModelConfig(num_speculative_tokens=4)
"""The scripted proposers stand in the place of the draft model."""


def next_token(token_ids: list[int], num_prompt: int, params: SamplingParams, banned: tuple[int, ...] = ()) -> int:
    """The plain loop's next token, by the specification."""
    visible = list(zip(token_ids, range(len(token_ids)), strict=True))
    output = token_ids[num_prompt:]
    counts = TokenCounts(frozenset(token_ids[:num_prompt]), {t: output.count(t) for t in output})
    row = SamplingRow(params, len(token_ids), banned if len(output) < params.min_tokens else (), counts)
    return sample(TokenRunner.logits(visible)[None], [row]).token_ids[0]


def plain_loop(request: Submit, *, eos: bool = False) -> list[int]:
    """What the target alone says: one token at a time, no cache, no batch."""
    token_ids = list(request.prompt_token_ids)
    params = request.sampling
    stops = {*params.stop_token_ids, *((EOS,) if eos and not params.ignore_eos else ())}
    while len(token_ids) - len(request.prompt_token_ids) < params.max_tokens:
        token_ids.append(next_token(token_ids, len(request.prompt_token_ids), params, tuple(stops)))
        if token_ids[-1] in stops:
            break
    return token_ids[len(request.prompt_token_ids) :]


def truth(context: DraftContext, num_tokens: int) -> list[int]:
    """What the target will say after a context."""
    token_ids = list(context.token_ids)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids, context.num_prompt_tokens, context.sampling))
    return token_ids[len(context.token_ids) :]


def engine_with(
    proposer: Proposer | None = None,
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_waiting: int = 100,
    eos: bool = False,
) -> Engine:
    proposers: dict[str, Proposer] = {"ngram": NgramProposer()}
    if proposer is not None:
        proposers["draft_model"] = proposer
    return Engine(
        TokenRunner(num_blocks, block_size, eos=eos),
        Roster(proposers),
        DraftLengthController(StepCostModel()),
        model_fingerprint="integers",
        default_config=NoSpeculation(),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_waiting=max_waiting,
    )


class Run:
    """Steps an engine, checking its invariants, and collects what comes out."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, SequenceOutput] = {}

    def submit(self, request: Submit) -> None:
        assert self.engine.submit(request) is None
        self.tokens[request.request_id] = []

    def step(self) -> None:
        for output in self.engine.step():
            self.tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                self.finished[output.request_id] = output
        self.engine.check()

    def until_idle(self, most_steps: int = 2000) -> Run:
        for _ in range(most_steps):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, "the engine does not come to an end"
        assert self.engine.pool.num_in_use == 0
        return self


def request_of(name: str, prompt: list[int], config: object = None, **sampling: object) -> Submit:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 20, **sampling})  # type: ignore[arg-type]
    return Submit(request_id=name, prompt_token_ids=prompt, sampling=params, speculation=config)  # type: ignore[arg-type]
