"""What a step brought, put into words: counted, learned from, and told to the clients.

Nothing that plans a step needs this, so it can be done while a device works on the next one.
"""

from __future__ import annotations

from dataclasses import dataclass

from speculation.counters import EngineCounters
from speculation.drafting import Drafting
from speculation.messages import SequenceOutput, TokenLogprob
from speculation.step_batch import SequenceRows
from target.sampling import RowLogprobs, SampledRows


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """What a step brought one sequence, which has it already."""

    rows: SequenceRows
    path: tuple[int, ...]
    """Accepted nodes of its draft, in order of depth."""
    token_ids: list[int]
    """Those of the path, then the target's own: none only if the sequence was at its end."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought, of the sequences that got tokens."""

    sequences: list[SequenceResult]
    sampled: SampledRows
    now: float
    """When it was known."""


class StepReporter:
    """Words the results of steps, each once and in order."""

    def __init__(self, counters: EngineCounters, drafting: Drafting) -> None:
        self._counters = counters
        self._drafting = drafting

    def report(self, step: StepResult) -> list[SequenceOutput]:
        """One output a sequence. Proposers and counters have learned of the step when this returns."""
        outputs = []
        for result in step.sequences:
            self._note(result)
            outputs.append(self._output(result, step))
            if result.rows.scheduled.sequence.is_finished:
                self._drafting.finish(result.rows.scheduled.sequence)
        return outputs

    def _note(self, result: SequenceResult) -> None:
        sequence, draft = result.rows.scheduled.sequence, result.rows.scheduled.draft
        sequence.counters.num_steps += 1
        sequence.note_draft(draft, len(result.path))
        self._counters.note_draft(draft, result.path)
        self._counters.totals["output_tokens"] += len(result.token_ids)
        self._drafting.observe(sequence, draft, result.path)

    @staticmethod
    def _output(result: SequenceResult, step: StepResult) -> SequenceOutput:
        sequence, draft, token_ids = result.rows.scheduled.sequence, result.rows.scheduled.draft, result.token_ids
        num_accepted = len(result.path)
        logprobs = None
        if sequence.sampling.logprobs is not None:
            # Token j of the step was chosen at the root (j = 0) or at the node accepted before it.
            nodes = [0, *(1 + node for node in result.path)][: len(token_ids)]
            chosen = [step.sampled.logprobs[result.rows.first_sampled + node] for node in nodes]
            logprobs = [token_logprob(row) for row in chosen if row is not None]
        is_first = sequence.num_output_tokens == len(token_ids) + len(sequence.request.output_token_ids)
        return SequenceOutput(
            request_id=sequence.request.request_id,
            token_ids=token_ids,
            sources=[draft.source if j < num_accepted else "target" for j in range(len(token_ids))],
            logprobs=logprobs,
            prompt_logprobs=sequence.prompt_logprobs if is_first else None,
            finish_reason=sequence.finish_reason,
            stop_token_id=sequence.stop_token_id,
            metrics=sequence.metrics(step.now) if sequence.is_finished else None,
        )


def token_logprob(row: RowLogprobs) -> TokenLogprob:
    """As messages carry it."""
    return TokenLogprob(row.logprob, row.rank, row.top_token_ids, row.top_logprobs)
