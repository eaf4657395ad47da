"""The engine: a synchronous object that owns a loaded model and advances all its sequences one step at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import torch

from cache_store.block_pool import BlockPool
from draft.config import AutoConfig, FirstConfig, NoSpeculation, SpeculationConfig, resolve
from draft.proposer import Features
from draft.roster import Roster
from speculation.controller import DraftLengthController
from speculation.counters import EngineCounters
from speculation.drafting import Drafting
from speculation.messages import Rejected, SequenceOutput, Stats, Submit
from speculation.scheduler import Scheduler, StepPlan
from speculation.sequence import Sequence
from speculation.step_batch import SequenceRows, StepBatch, StepBatchBuilder
from speculation.step_report import SequenceResult, StepReporter, StepResult, token_logprob
from speculation.submit_check import SubmitLimits, check_submit
from speculation.verify import Verdict, walk
from target.batch import ForwardOutput
from target.layout import slots_of
from target.runner import Runner
from target.sampling import PendingRows, SampledRows, score, start_sampling
from target.transfers import to_device


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that the device is working on, or has been."""

    plan: StepPlan
    batch: StepBatch
    forward: ForwardOutput
    choices: PendingRows
    started: float


class Engine:
    """Grows sequences by verified tokens. Knows no sockets and no text; time comes from `clock` (seconds).

    A step is launched, settled and reported, in turn. What it takes to plan the next one is true when it is settled, so
    where the device works by itself (`overlaps`) a step may be reported when the next has been launched, while nobody
    would do anything but wait. The tokens are the same either way.

    After every step, for every decoding sequence `num_computed_tokens == num_tokens - 1`, and every block is free,
    cached or in use; `check` proves both.
    """

    def __init__(
        self,
        runner: Runner,
        roster: Roster,
        controller: DraftLengthController,
        *,
        model_fingerprint: str,
        default_config: SpeculationConfig,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_waiting: int,
        max_model_len: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ValueError for a default config whose method `roster` does not have."""
        self.pool = BlockPool(runner.kv_pool.num_blocks, runner.kv_pool.block_size)
        self.max_model_len = min(max_model_len or runner.config.max_model_len, runner.config.max_model_len)
        self._methods = roster.methods
        try:
            resolve(default_config, self._methods)
        except ValueError as error:
            raise ValueError(f"speculation: {error}") from error
        self._scheduler = Scheduler(
            self.pool,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            model_fingerprint=model_fingerprint,
        )
        self._max_waiting = max_waiting
        self._runner = runner
        self._default_config = default_config
        self._clock = clock
        self._drafting = Drafting(roster, controller, hidden_size=runner.config.hidden_size)
        self._builder = StepBatchBuilder(
            runner.kv_pool.block_size, runner.config.eos_token_ids, self._drafting.feature_layers
        )
        self._sequences: dict[str, Sequence] = {}
        self._seq_ids = count()
        self._counters = EngineCounters()
        self._reporter = StepReporter(self._counters, self._drafting)

    @property
    def overlaps(self) -> bool:
        """Whether `launch` returns while the device computes."""
        return self._runner.device.type == "cuda"

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return self._scheduler.has_work

    @property
    def methods(self) -> list[str]:
        """Speculation methods this engine can serve."""
        every = (NoSpeculation, AutoConfig, FirstConfig)
        return [*(str(kind.__struct_config__.tag) for kind in every), *sorted(self._methods)]

    def submit(self, request: Submit) -> Rejected | None:
        """Take a sequence into the queue, or say why not; then nothing of it is kept."""
        try:
            config = resolve(
                request.speculation or self._default_config,
                self._methods,
                has_prediction=bool(request.prediction_token_ids),
            )
        except ValueError as error:
            return _rejected(request, "invalid", str(error), "speculation.method")
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        sequence = Sequence(next(self._seq_ids), request, config, self._clock())
        self._sequences[request.request_id] = sequence
        self._scheduler.add(sequence)
        self._drafting.start(sequence)
        self._counters.totals["requests"] += 1
        return None

    def abort(self, request_id: str) -> SequenceOutput | None:
        """End a sequence now; its blocks are free when this returns. None if it is not here (any more).

        Between steps: what was launched is settled, and reported.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        sequence.finish_reason = "abort"
        self._counters.totals["aborts"] += 1
        self._retire(sequence)
        self._drafting.finish(sequence)
        return SequenceOutput(request_id=request_id, finish_reason="abort", metrics=sequence.metrics(self._clock()))

    def step(self) -> list[SequenceOutput]:
        """Advance every scheduled sequence: guess, verify all guesses in one forward, commit what the target says."""
        return self.report(self.settle(self.launch()))

    def launch(self) -> LaunchedStep:
        """Plan a step from what is committed, and give it to the device."""
        started = self._clock()
        scheduler, ready = self._scheduler, self._scheduler.ready_for_draft()
        others = scheduler.num_rows_behind(len(ready)), scheduler.num_not_ready(len(ready))
        drafts = self._drafting.propose(ready, *others)
        plan = self._scheduler.plan(drafts)
        self._note_plan(plan, started)
        batch = self._builder.build(plan)
        forward = self._runner.forward(batch.forward)
        return LaunchedStep(plan, batch, forward, self._start_sampling(batch, forward), started)

    def settle(self, step: LaunchedStep) -> StepResult:
        """Wait for the target's tokens and commit them: when this returns, the next step can be planned."""
        sampled = step.choices.wait()
        verdicts = [self._verdict(rows, sampled) for rows in step.batch.rows]
        self._move_accepted(step.batch, verdicts)
        now = self._clock()
        results = [
            self._commit(rows, verdict, step.forward, now)
            for rows, verdict in zip(step.batch.rows, verdicts, strict=True)
        ]
        found = [result for result in results if result is not None]
        self._note_step(step.plan, sum(len(result.token_ids) for result in found), self._clock() - step.started)
        return StepResult(found, sampled, now)

    def report(self, result: StepResult) -> list[SequenceOutput]:
        """What a settled step brought each sequence. Before the next one is settled, and before anything is aborted."""
        return self._reporter.report(result)

    def stats(self) -> Stats:
        """Gauges and totals, at any time between steps."""
        return self._counters.stats(
            self.pool, num_waiting=len(self._scheduler.waiting), num_running=len(self._scheduler.running)
        )

    def check(self) -> None:
        """Prove the invariants that hold between steps. Raises `AssertionError` saying what is wrong."""
        self.pool.check()
        for sequence in self._scheduler.running:
            if sequence.num_output_tokens and sequence.num_computed_tokens > sequence.num_tokens - 1:
                raise AssertionError(f"sequence {sequence.seq_id} has computed a token that is not committed")
            if sequence.table is None or self.pool.capacity(sequence.table) < sequence.num_computed_tokens:
                raise AssertionError(f"sequence {sequence.seq_id} has fewer blocks than computed tokens")
            if len(sequence.table.block_ids) > self.pool.blocks_for(sequence.num_tokens):
                raise AssertionError(f"sequence {sequence.seq_id} still holds blocks for guesses")
        if not self.has_work and self.pool.num_in_use:
            raise AssertionError(f"{self.pool.num_in_use} blocks are in use although no sequence is here")

    def _refusal(self, request: Submit) -> Rejected | None:
        most = min(self.max_model_len, self.pool.num_usable * self.pool.block_size)
        wrong = check_submit(request, SubmitLimits(vocab_size=self._runner.config.vocab_size, context=most))
        if wrong is not None:
            return wrong
        if request.request_id in self._sequences:
            return _rejected(request, "invalid", f"request id {request.request_id!r} is in use")
        num_waiting = len(self._scheduler.waiting)
        if num_waiting >= self._max_waiting:
            return _rejected(request, "overloaded", f"{num_waiting} requests are waiting already; try again later")
        return None

    def _note_plan(self, plan: StepPlan, now: float) -> None:
        self._counters.totals["preemptions"] += len(plan.preempted)
        for sequence in plan.admitted:
            self._counters.totals["cached_tokens"] += sequence.num_computed_tokens
            if sequence.counters.first_scheduled is None:
                sequence.counters.first_scheduled = now
                sequence.counters.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)

    def _start_sampling(self, batch: StepBatch, forward: ForwardOutput) -> PendingRows:
        logits = forward.logits
        if len(batch.sampled) != logits.shape[0]:
            logits = logits[to_device(batch.sampled_logits, logits.device, torch.int64)]
        return start_sampling(logits, batch.sampled)

    def _verdict(self, rows: SequenceRows, sampled: SampledRows) -> Verdict | None:
        """What the target says after this sequence's last committed token; None if the step did not get that far."""
        if rows.first_sampled < 0:
            return None
        draft = rows.scheduled.draft
        return walk(draft, sampled.token_ids[rows.first_sampled : rows.first_sampled + 1 + len(draft)])

    def _move_accepted(self, batch: StepBatch, verdicts: list[Verdict | None]) -> None:
        """Bring keys and values of accepted tree nodes side by side, behind the committed ones. Nothing for chains."""
        sources: list[int] = []
        destinations: list[int] = []
        for rows, verdict in zip(batch.rows, verdicts, strict=True):
            if verdict is None or verdict.path == tuple(range(len(verdict.path))):
                continue
            sequence = rows.scheduled.sequence
            assert sequence.table is not None
            first, last = sequence.num_tokens, sequence.num_tokens + len(rows.scheduled.draft)
            slots = slots_of(sequence.table.block_ids, first, last, self.pool.block_size)
            sources += [slots[node] for node in verdict.path]
            destinations += slots[: len(verdict.path)]
        self._runner.kv_pool.move(sources, destinations)

    def _commit(
        self, rows: SequenceRows, verdict: Verdict | None, forward: ForwardOutput, now: float
    ) -> SequenceResult | None:
        """Append what was verified, keep the pool true to it, and tell the proposer."""
        scheduled, sequence = rows.scheduled, rows.scheduled.sequence
        assert sequence.table is not None
        computed_from = sequence.num_computed_tokens
        sequence.num_computed_tokens += scheduled.num_chain
        self._note_chunk(sequence, scheduled.num_chain, now)
        self._score_prompt(rows, forward)
        token_ids: list[int] = []
        path: tuple[int, ...] = ()
        if verdict is not None:
            token_ids = self._truncate(sequence, verdict)
            path = verdict.path[: len(token_ids)]
            sequence.counters.saved_seconds += self._drafting.saved_seconds(sequence, scheduled.draft, len(token_ids))
            sequence.append(token_ids)
            sequence.num_computed_tokens += max(len(token_ids) - 1, 0)
        self.pool.trim(sequence.table, max(sequence.num_tokens, sequence.num_computed_tokens))
        self.pool.commit(sequence.table, sequence.token_ids, sequence.num_computed_tokens)
        features = None
        if forward.features is not None and self._drafting.wants_features(sequence):
            accepted = path[: max(len(token_ids) - 1, 0)]
            features = _features_of(rows, accepted, forward.features, computed_from)
        self._drafting.commit(sequence, token_ids, features)
        if sequence.is_finished:
            self._retire(sequence)
        return None if verdict is None else SequenceResult(rows, path, token_ids)

    def _note_step(self, plan: StepPlan, num_tokens: int, seconds: float) -> None:
        self._counters.note_step(seconds)
        load = plan.load
        is_pure = bool(plan.scheduled) and all(s.num_chain == 1 and s.completes for s in plan.scheduled)
        if is_pure:
            self._counters.decode.note(num_tokens, seconds)
        elif plan.scheduled:
            self._counters.prefill.note(load.num_rows, seconds)
        self._drafting.end(load, num_tokens=num_tokens, step_seconds=seconds, is_pure=is_pure)

    def _note_chunk(self, sequence: Sequence, num_chain: int, now: float) -> None:
        if sequence.counters.prefill_end is None:
            sequence.counters.num_prefill_chunks += 1
            self._counters.totals["prompt_tokens"] += num_chain
            if sequence.num_computed_tokens >= sequence.num_prompt_tokens:
                sequence.counters.prefill_end = now

    def _score_prompt(self, rows: SequenceRows, forward: ForwardOutput) -> None:
        """Logprobs of the prompt tokens that follow the rows of this chunk."""
        if not rows.num_prompt_logits:
            return
        sequence = rows.scheduled.sequence
        assert sequence.prompt_logprobs is not None
        done = len(sequence.prompt_logprobs)
        following = sequence.token_ids[done + 1 : done + 1 + rows.num_prompt_logits]
        logits = forward.logits[rows.first_logit : rows.first_logit + rows.num_prompt_logits]
        token_ids = to_device(following, logits.device)
        scored = score(logits, token_ids, sequence.request.prompt_logprobs or 0)
        sequence.prompt_logprobs += [token_logprob(row) for row in scored]

    def _truncate(self, sequence: Sequence, verdict: Verdict) -> list[int]:
        """The verified tokens up to the first that ends the sequence, or to its limit; the one place where it ends."""
        stops = self._builder.stop_token_ids(sequence)
        token_ids: list[int] = []
        for token_id in verdict.token_ids[: sequence.num_remaining_tokens]:
            token_ids.append(token_id)
            if token_id in stops:
                sequence.finish_reason, sequence.stop_token_id = "stop", token_id
                return token_ids
        if len(token_ids) == sequence.num_remaining_tokens:
            sequence.finish_reason = "length"
        return token_ids

    def _retire(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended; its blocks are free when this returns."""
        self._scheduler.remove(sequence)
        del self._sequences[sequence.request.request_id]
        self._counters.note_saved(sequence.counters.saved_seconds)


def _features_of(rows: SequenceRows, accepted: tuple[int, ...], features: torch.Tensor, start: int) -> Features:
    """Those of the tokens that are committed and were computed in this step: the chain, then accepted nodes."""
    chain_end = rows.first_row + rows.scheduled.num_chain
    if not accepted or accepted == tuple(range(len(accepted))):
        return Features(start, features, rows.first_row, chain_end + len(accepted))
    index = [*range(rows.first_row, chain_end), *(chain_end + node for node in accepted)]
    return Features(start, features[to_device(index, features.device)])


def _rejected(request: Submit, code: str, message: str, param: str | None = None) -> Rejected:
    return Rejected(request_id=request.request_id, code=code, message=message, param=param)
