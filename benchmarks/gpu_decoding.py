"""Decoding end to end with a proposer that guesses right as often as it is told to."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from draft.config import DraftModelConfig, NoSpeculation
from draft.proposer import DraftContext, Features
from draft.roster import Roster
from draft.tree import Draft
from speculation.controller import DraftLengthController
from speculation.cost_model import StepCostModel
from speculation.engine import Engine
from speculation.messages import Submit
from speculation.step_report import StepResult
from target.runner import Runner
from target.sampling_params import SamplingParams

METHOD = "draft_model"
"""In whose place the scripted proposer stands."""


@dataclass(slots=True)
class ScriptedProposer:
    """Knows the answer, and says each token of it with a probability; a wrong token otherwise."""

    vocab_size: int
    answer: Sequence[int] = ()
    acceptance: float = 1.0
    name: str = METHOD
    needs_features: tuple[int, ...] = ()
    random: random.Random = field(default_factory=lambda: random.Random(0))

    def start(
        self, seq_id: int, prompt_token_ids: Sequence[int], *, cache_salt: str = "", prediction: Sequence[int] = ()
    ) -> None:
        pass

    def propose(self, contexts: Sequence[DraftContext], limits: Sequence[int]) -> list[Draft]:
        drafts = []
        for context, limit in zip(contexts, limits, strict=True):
            done = len(context.token_ids) - context.num_prompt_tokens
            guesses = [
                token if self.random.random() < self.acceptance else (token + 1) % self.vocab_size
                for token in self.answer[done : done + limit]
            ]
            drafts.append(Draft.chain(tuple(guesses), METHOD))
        return drafts

    def commit(self, seq_id: int, token_ids: Sequence[int], features: Features | None) -> None:
        pass

    def finish(self, seq_id: int) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Decoded:
    """One answer."""

    token_ids: list[int]
    tokens_per_second: float
    """Behind the prompt's step."""


class Decoding:
    """One engine over a runner, asked one request at a time."""

    def __init__(self, runner: Runner, prompt: list[int], num_tokens: int) -> None:
        self._proposer = ScriptedProposer(runner.config.vocab_size)
        self._engine = Engine(
            runner,
            Roster({METHOD: self._proposer}),
            DraftLengthController(StepCostModel()),
            model_fingerprint="random weights",
            default_config=NoSpeculation(),
            max_num_seqs=4,
            max_num_batched_tokens=512,
            max_waiting=4,
        )
        self._prompt, self._num_tokens = prompt, num_tokens
        self._count = 0

    def plain(self) -> Decoded:
        """The answer without speculation, which later proposals are made of."""
        decoded = self._decode(NoSpeculation())
        self._proposer.answer = decoded.token_ids
        return decoded

    def speculative(self, acceptance: float, num_drafted: int) -> Decoded:
        """The same with drafts of `num_drafted` tokens, each right with probability `acceptance`."""
        self._proposer.acceptance, self._proposer.random = acceptance, random.Random(1)
        return self._decode(DraftModelConfig(num_speculative_tokens=num_drafted))

    def _decode(self, config: NoSpeculation | DraftModelConfig) -> Decoded:
        self._count += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=self._num_tokens, ignore_eos=True)
        request = Submit(
            request_id=str(self._count),
            prompt_token_ids=self._prompt,
            sampling=sampling,
            speculation=config,
            cache_salt=str(self._count),
        )
        refused = self._engine.submit(request)
        assert refused is None, refused
        token_ids: list[int] = []
        started, num_before = 0.0, 0
        untold: StepResult | None = None
        while self._engine.has_work:
            step = self._engine.launch()
            if untold is not None:
                self._engine.report(untold)  # as the engine's process does, while the device works
            untold = self._engine.settle(step)
            token_ids += [token_id for sequence in untold.sequences for token_id in sequence.token_ids]
            if token_ids and not started:
                started, num_before = time.perf_counter(), len(token_ids)
        seconds = time.perf_counter() - started
        assert untold is not None
        self._engine.report(untold)
        return Decoded(token_ids, (len(token_ids) - num_before) / seconds)
