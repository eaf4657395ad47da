"""The engine: a synchronous object that owns a loaded model and advances all its sequences one step at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count

import torch

from cache_store.block_pool import BlockPool
from draft.config import NoSpeculation, SpeculationConfig, method_of
from draft.proposer import DraftContext, Features, Proposer
from draft.tree import Draft
from speculation.counters import EngineCounters
from speculation.messages import Rejected, SequenceOutput, Stats, Submit, TokenLogprob
from speculation.scheduler import ScheduledSequence, Scheduler, StepPlan
from speculation.sequence import Sequence
from speculation.step_batch import SequenceRows, StepBatch, StepBatchBuilder
from speculation.verify import Verdict, walk
from target.batch import MAX_TREE_SIZE, ForwardOutput
from target.layout import slots_of
from target.runner import Runner
from target.sampling import RowLogprobs, SampledRows, sample, score

AUTO_NUM_SPECULATIVE_TOKENS = 8


class Engine:
    """Grows sequences by verified tokens. Knows no sockets and no text; time comes from `clock` (seconds).

    After every step, for every decoding sequence `num_computed_tokens == num_tokens - 1`, and every block is free,
    cached or in use; `check` proves both.
    """

    def __init__(
        self,
        runner: Runner,
        proposers: Mapping[str, Proposer],
        *,
        model_fingerprint: str,
        default_config: SpeculationConfig,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_waiting: int,
        max_model_len: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = BlockPool(runner.kv_pool.num_blocks, runner.kv_pool.block_size)
        self.max_model_len = min(max_model_len or runner.config.max_model_len, runner.config.max_model_len)
        self.max_waiting = max_waiting
        self._scheduler = Scheduler(
            self.pool,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            model_fingerprint=model_fingerprint,
        )
        self._runner = runner
        self._proposers = proposers
        self._default_config = default_config
        self._clock = clock
        self._feature_layers = {name: proposer.needs_features for name, proposer in proposers.items()}
        layers = tuple(sorted({layer for needed in self._feature_layers.values() for layer in needed}))
        self._builder = StepBatchBuilder(runner.kv_pool.block_size, runner.config.eos_token_ids, layers)
        self._sequences: dict[str, Sequence] = {}
        self._seq_ids = count()
        self._counters = EngineCounters()

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return self._scheduler.has_work

    @property
    def methods(self) -> list[str]:
        """Speculation methods this engine can serve."""
        return [method_of(NoSpeculation()), *self._proposers]

    def submit(self, request: Submit) -> Rejected | None:
        """Take a sequence into the queue, or say why not; then nothing of it is kept."""
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        config = request.speculation or self._default_config
        sequence = Sequence(next(self._seq_ids), request, config, self._clock())
        self._sequences[request.request_id] = sequence
        self._scheduler.add(sequence)
        if (proposer := self._proposer_of(sequence)) is not None:
            proposer.start(
                sequence.seq_id,
                sequence.token_ids,
                cache_salt=request.cache_salt,
                prediction=request.prediction_token_ids,
            )
        self._counters.totals["requests"] += 1
        return None

    def abort(self, request_id: str) -> SequenceOutput | None:
        """End a sequence now; its blocks are free when this returns. None if it is not here (any more)."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        sequence.finish_reason = "abort"
        self._counters.totals["aborts"] += 1
        self._retire(sequence)
        return SequenceOutput(request_id=request_id, finish_reason="abort", metrics=sequence.metrics(self._clock()))

    def step(self) -> list[SequenceOutput]:
        """Advance every scheduled sequence: guess, verify all guesses in one forward, commit what the target says."""
        started = self._clock()
        plan = self._scheduler.plan(self._propose())
        self._note_plan(plan, started)
        batch = self._builder.build(plan)
        forward = self._runner.forward(batch.forward)
        sampled = self._sample(batch, forward)
        verdicts = [self._verdict(rows, sampled) for rows in batch.rows]
        self._move_accepted(batch, verdicts)
        now = self._clock()
        outputs = [
            self._commit(rows, verdict, sampled, forward, now)
            for rows, verdict in zip(batch.rows, verdicts, strict=True)
        ]
        self._counters.note_step(now - started)
        return [output for output in outputs if output is not None]

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
        def reject(code: str, message: str, param: str | None = None) -> Rejected:
            return Rejected(request_id=request.request_id, code=code, message=message, param=param)

        num_prompt, num_tokens = (
            len(request.prompt_token_ids),
            len(request.prompt_token_ids) + request.sampling.max_tokens,
        )
        capacity = self.pool.num_usable * self.pool.block_size
        method = method_of(request.speculation) if request.speculation is not None else None
        vocab_size = self._runner.config.vocab_size
        if request.request_id in self._sequences:
            return reject("invalid", f"request id {request.request_id!r} is in use")
        if num_prompt == 0:
            return reject("invalid", "the prompt has no tokens; at least one is needed", "prompt")
        if not all(0 <= token_id < vocab_size for token_id in (*request.prompt_token_ids, *request.output_token_ids)):
            return reject("invalid", f"token ids must be between 0 and {vocab_size - 1}", "prompt")
        if num_tokens > min(self.max_model_len, capacity):
            most = min(self.max_model_len, capacity)
            message = (
                f"{num_prompt} prompt tokens and max_tokens {request.sampling.max_tokens} exceed the context of {most}"
            )
            return reject("invalid", message, "max_tokens")
        if method is not None and method not in self.methods:
            return reject(
                "invalid", f"method {method!r} is not served here; one of {self.methods}", "speculation.method"
            )
        if len(self._scheduler.waiting) >= self.max_waiting:
            return reject("overloaded", f"{len(self._scheduler.waiting)} requests are waiting already; try again later")
        return None

    def _proposer_of(self, sequence: Sequence) -> Proposer | None:
        return self._proposers.get(method_of(sequence.config))

    def _propose(self) -> dict[int, Draft]:
        """Drafts by seq_id, of every sequence that could verify one; each proposer is asked once, for all of its own."""
        drafts: dict[int, Draft] = {}
        asked: dict[str, list[tuple[DraftContext, int]]] = {}
        for sequence in self._scheduler.ready_for_draft():
            limit = self._limit(sequence)
            if self._proposer_of(sequence) is None:
                drafts[sequence.seq_id] = Draft.none("disabled")
            elif limit <= 0:
                drafts[sequence.seq_id] = Draft.none("last_token")
            else:
                asked.setdefault(method_of(sequence.config), []).append((_context(sequence), limit))
        for method, entries in asked.items():
            contexts, limits = [c for c, _ in entries], [n for _, n in entries]
            answers = self._proposers[method].propose(contexts, limits)
            drafts.update((c.seq_id, draft) for c, draft in zip(contexts, answers, strict=True))
        return drafts

    def _limit(self, sequence: Sequence) -> int:
        """How many tokens to guess at most for this sequence in this step."""
        wanted = getattr(sequence.config, "num_speculative_tokens", 0)
        if wanted == "auto":
            wanted = AUTO_NUM_SPECULATIVE_TOKENS
        return min(int(wanted), sequence.num_remaining_tokens - 1, MAX_TREE_SIZE)

    def _note_plan(self, plan: StepPlan, now: float) -> None:
        self._counters.totals["preemptions"] += len(plan.preempted)
        for sequence in plan.admitted:
            self._counters.totals["cached_tokens"] += sequence.num_computed_tokens
            if sequence.counters.first_scheduled is None:
                sequence.counters.first_scheduled = now
                sequence.counters.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)

    def _sample(self, batch: StepBatch, forward: ForwardOutput) -> SampledRows:
        logits = forward.logits
        if len(batch.sampled) != logits.shape[0]:
            logits = logits[torch.tensor(batch.sampled_logits, dtype=torch.int64, device=logits.device)]
        return sample(logits, batch.sampled)

    def _verdict(self, rows: SequenceRows, sampled: SampledRows) -> Verdict | None:
        """What the target says after this sequence's last committed token; None if the step did not get that far."""
        if rows.first_sampled < 0:
            return None
        draft = rows.scheduled.draft
        return walk(draft, sampled.token_ids[rows.first_sampled : rows.first_sampled + 1 + len(draft)])

    def _move_accepted(self, batch: StepBatch, verdicts: list[Verdict | None]) -> None:
        """Bring the keys and values of accepted tree nodes side by side, behind the committed ones. Nothing for chains."""
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
        self, rows: SequenceRows, verdict: Verdict | None, sampled: SampledRows, forward: ForwardOutput, now: float
    ) -> SequenceOutput | None:
        """Append what was verified, keep the pool true to it, and tell the proposer and the client."""
        scheduled, sequence = rows.scheduled, rows.scheduled.sequence
        assert sequence.table is not None
        computed_from = sequence.num_computed_tokens
        sequence.num_computed_tokens += scheduled.num_chain
        self._note_chunk(scheduled, computed_from, now)
        self._score_prompt(rows, forward)
        token_ids: list[int] = []
        path: tuple[int, ...] = ()
        if verdict is not None:
            token_ids = self._truncate(sequence, verdict)
            path = verdict.path[: len(token_ids)]
            self._note_draft(scheduled, path)
            sequence.append(token_ids)
            sequence.num_computed_tokens += max(len(token_ids) - 1, 0)
        self.pool.trim(sequence.table, max(sequence.num_tokens, sequence.num_computed_tokens))
        self.pool.commit(sequence.table, sequence.token_ids, sequence.num_computed_tokens)
        self._tell_proposer(rows, path, token_ids, computed_from, forward)
        output = self._output(rows, path, token_ids, sampled, now) if verdict is not None else None
        if sequence.is_finished:
            self._retire(sequence)
        return output

    def _note_chunk(self, scheduled: ScheduledSequence, computed_from: int, now: float) -> None:
        sequence = scheduled.sequence
        if sequence.counters.prefill_end is None:
            sequence.counters.num_prefill_chunks += 1
            self._counters.totals["prompt_tokens"] += scheduled.num_chain
            if computed_from + scheduled.num_chain >= sequence.num_prompt_tokens:
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
        token_ids = torch.tensor(following, device=logits.device)
        scored = score(logits, token_ids, sequence.request.prompt_logprobs or 0)
        sequence.prompt_logprobs += [_token_logprob(row) for row in scored]

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

    def _note_draft(self, scheduled: ScheduledSequence, path: tuple[int, ...]) -> None:
        sequence = scheduled.sequence
        sequence.counters.num_steps += 1
        sequence.note_draft(scheduled.draft, len(path))
        self._counters.note_draft(scheduled.draft, path)

    def _tell_proposer(
        self,
        rows: SequenceRows,
        path: tuple[int, ...],
        token_ids: list[int],
        computed_from: int,
        forward: ForwardOutput,
    ) -> None:
        proposer = self._proposer_of(rows.scheduled.sequence)
        if proposer is None:
            return
        features = None
        if proposer.needs_features and forward.features is not None:
            chain = range(rows.first_row, rows.first_row + rows.scheduled.num_chain)
            accepted = [chain.stop + node for node in path[: max(len(token_ids) - 1, 0)]]
            index = torch.tensor([*chain, *accepted], device=forward.features.device)
            features = Features(computed_from, forward.features[index][:, self._columns(proposer, forward)])
        if token_ids or features is not None:
            proposer.commit(rows.scheduled.sequence.seq_id, token_ids, features)

    def _columns(self, proposer: Proposer, forward: ForwardOutput) -> torch.Tensor:
        """Which columns of the features this proposer asked for: batches carry the union of all proposers' layers."""
        assert forward.features is not None
        hidden = self._runner.config.hidden_size
        layers = self._builder.feature_layers
        starts = [layers.index(layer) * hidden for layer in proposer.needs_features]
        return torch.cat([torch.arange(start, start + hidden) for start in starts]).to(forward.features.device)

    def _output(
        self, rows: SequenceRows, path: tuple[int, ...], token_ids: list[int], sampled: SampledRows, now: float
    ) -> SequenceOutput:
        sequence, draft = rows.scheduled.sequence, rows.scheduled.draft
        logprobs = None
        if sequence.sampling.logprobs is not None:
            # Token j of the step was chosen at the root (j = 0) or at the node accepted before it.
            nodes = [0, *(1 + node for node in path)][: len(token_ids)]
            chosen = [sampled.logprobs[rows.first_sampled + node] for node in nodes]
            logprobs = [_token_logprob(row) for row in chosen if row is not None]
        first_output = sequence.num_output_tokens == len(token_ids) + len(sequence.request.output_token_ids)
        self._counters.totals["output_tokens"] += len(token_ids)
        return SequenceOutput(
            request_id=sequence.request.request_id,
            token_ids=token_ids,
            sources=[draft.source if j < len(path) else "target" for j in range(len(token_ids))],
            logprobs=logprobs,
            prompt_logprobs=sequence.prompt_logprobs if first_output else None,
            finish_reason=sequence.finish_reason,
            stop_token_id=sequence.stop_token_id,
            metrics=sequence.metrics(now) if sequence.is_finished else None,
        )

    def _retire(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        self._scheduler.remove(sequence)
        del self._sequences[sequence.request.request_id]
        if (proposer := self._proposer_of(sequence)) is not None:
            proposer.finish(sequence.seq_id)


def _context(sequence: Sequence) -> DraftContext:
    return DraftContext(
        seq_id=sequence.seq_id,
        token_ids=sequence.token_ids,
        num_prompt_tokens=sequence.num_prompt_tokens,
        sampling=sequence.sampling,
        config=sequence.config,
        cache_salt=sequence.request.cache_salt,
    )


def _token_logprob(row: RowLogprobs) -> TokenLogprob:
    return TokenLogprob(row.logprob, row.rank, row.top_token_ids, row.top_logprobs)
