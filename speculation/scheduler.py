"""The scheduler: which tokens of which sequences the next step computes."""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter, mul

from cache_store.block_pool import BlockPool
from cache_store.hashing import root_hash
from draft.tree import Draft
from speculation.cost_model import StepLoad
from speculation.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's share of a step: committed tokens to compute, then its draft."""

    sequence: Sequence
    num_chain: int
    """Committed tokens computed in this step, at least one."""
    draft: Draft

    @property
    def completes(self) -> bool:
        """Whether this step computes the last committed token, so that a new one is sampled."""
        return self.num_chain == self.sequence.num_uncomputed_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a step computes. Blocks for all of it are reserved."""

    scheduled: tuple[ScheduledSequence, ...]
    admitted: tuple[Sequence, ...]
    """Sequences that left the queue for this step."""
    preempted: tuple[Sequence, ...]
    """Sequences whose blocks were taken for more urgent ones; they are in the queue again."""

    @property
    def load(self) -> StepLoad:
        """What makes it long."""
        rows = [scheduled.num_chain + len(scheduled.draft) for scheduled in self.scheduled]
        contexts = [scheduled.sequence.num_tokens for scheduled in self.scheduled]
        return StepLoad(sum(rows), sum(contexts), sum(map(mul, rows, contexts)))


class TokenBudget:
    """Tokens a step may still compute."""

    def __init__(self, num_tokens: int) -> None:
        self.left = num_tokens

    def take(self, wanted: int) -> int:
        """Take up to `wanted`; returns how many there were."""
        taken = min(wanted, self.left)
        self.left -= taken
        return taken

    def give_back(self, num_tokens: int) -> None:
        """Return what a preempted sequence had taken."""
        self.left += num_tokens


class Scheduler:
    """Continuous batching by one rule: every step, committed tokens that are not computed catch up.

    There is no prefill phase and no decode phase. A new prompt, its next chunk, a resumed sequence and a decoding one
    differ only in how many tokens they are behind. Within the step's token budget come, in this order: the one token of
    each decoding sequence, chunks of those further behind, admissions from the queue, and last, from what is left,
    drafts. Blocks go the same way: guesses are trimmed before anybody is preempted, and it is always the least urgent
    (lowest priority, then youngest) who has to go.
    """

    def __init__(
        self, pool: BlockPool, *, max_num_seqs: int, max_num_batched_tokens: int, model_fingerprint: str
    ) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self._fingerprint = model_fingerprint
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        """Both most urgent first."""

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Put a sequence into the queue."""
        insort(self.waiting, sequence, key=attrgetter("urgency"))

    def remove(self, sequence: Sequence) -> None:
        """Take a finished or aborted sequence out and give its blocks back."""
        if sequence.table is None:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self.pool.release(sequence.table)
            sequence.table = None

    def ready_for_draft(self) -> list[Sequence]:
        """Sequences whose next step yields tokens, so that a guess could be verified in it."""
        return [sequence for sequence in self.running if sequence.is_decoding]

    def num_rows_behind(self, num_ready: int) -> int:
        """Rows that prompts, about, will have in the next step beside so many sequences that are ready for a draft."""
        behind = sum(sequence.num_uncomputed_tokens for sequence in (*self.running, *self.waiting[:1]))
        return min(behind, self.max_num_batched_tokens) - num_ready

    def num_not_ready(self, num_ready: int) -> int:
        """Sequences that will decode beside those, when their prompts are computed."""
        return min(len(self.running) + len(self.waiting), self.max_num_seqs) - num_ready

    def plan(self, drafts: Mapping[int, Draft]) -> StepPlan:
        """Plan one step; `drafts` by seq_id. Reserves blocks, admits and preempts, but computes nothing."""
        return _Planning(self, drafts).plan()

    def root_of(self, sequence: Sequence) -> bytes:
        """Where the chain of block hashes of a sequence begins: one model, one tenant."""
        return root_hash(self._fingerprint, sequence.request.cache_salt)

    def admit(self, sequence: Sequence) -> bool:
        """Move the head of the queue to the running ones, with its cached prefix, if all its tokens fit now."""
        root = self.root_of(sequence)
        # At least one token must be computed, for its logits; prompt logprobs need every row.
        most = 0 if sequence.wants_prompt_logprobs else sequence.num_tokens - 1
        match = self.pool.match(root, sequence.token_ids, most)
        needed = self.pool.blocks_for(sequence.num_tokens) - len(match.block_ids) + self.pool.num_revived(match)
        if needed > self.pool.num_available:
            return False
        self.waiting.remove(sequence)
        sequence.table = self.pool.open(root, match)
        sequence.num_computed_tokens = match.num_tokens
        insort(self.running, sequence, key=attrgetter("urgency"))
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Back into the queue, without blocks. What was computed may still be in the prefix cache when it resumes."""
        assert sequence.table is not None
        self.running.remove(sequence)
        self.pool.release(sequence.table)
        sequence.table = None
        sequence.num_computed_tokens = 0
        sequence.counters.num_preemptions += 1
        if sequence.wants_prompt_logprobs:
            sequence.prompt_logprobs = []
        self.add(sequence)


class _Planning:
    """One call of `Scheduler.plan`: the plan while it is made."""

    def __init__(self, scheduler: Scheduler, drafts: Mapping[int, Draft]) -> None:
        self._scheduler = scheduler
        self._pool = scheduler.pool
        self._drafts = drafts
        self._budget = TokenBudget(scheduler.max_num_batched_tokens)
        self._chains: dict[Sequence, int] = {}
        self._admitted: list[Sequence] = []
        self._preempted: list[Sequence] = []

    def plan(self) -> StepPlan:
        running = self._scheduler.running
        for sequence in [s for s in running if s.is_decoding] + [s for s in running if not s.is_decoding]:
            if sequence.table is not None:  # a more urgent one may just have preempted it
                self._schedule_chain(sequence)
        self._admit()
        scheduled = tuple(
            ScheduledSequence(sequence, num_chain, self._fit_draft(sequence))
            for sequence, num_chain in sorted(self._chains.items(), key=lambda item: item[0].urgency)
        )
        return StepPlan(scheduled, tuple(self._admitted), tuple(self._preempted))

    def _schedule_chain(self, sequence: Sequence) -> None:
        """Schedule as many uncomputed tokens as the budget has, preempting less urgent sequences for their blocks."""
        num_chain = self._budget.take(sequence.num_uncomputed_tokens)
        while num_chain:
            assert sequence.table is not None
            if self._pool.reserve(sequence.table, sequence.num_computed_tokens + num_chain):
                self._chains[sequence] = num_chain
                return
            victim = self._scheduler.running[-1]
            self._preempt(victim)
            if victim is sequence:
                self._budget.give_back(num_chain)
                return

    def _admit(self) -> None:
        """Admit from the queue's head. Nobody overtakes: what does not fit waits, and so do those behind it."""
        while self._scheduler.waiting and self._budget.left and not self._preempted:
            head = self._scheduler.waiting[0]
            if len(self._scheduler.running) < self._scheduler.max_num_seqs and self._scheduler.admit(head):
                self._admitted.append(head)
                self._schedule_chain(head)
            elif not self._displace_for(head):
                return

    def _displace_for(self, head: Sequence) -> bool:
        """Preempt the least urgent running sequence if its priority is lower than that of the queue's head."""
        running = self._scheduler.running
        if not running or running[-1].request.priority <= head.request.priority:
            return False
        victim = running[-1]
        self._scheduler.preempt(victim)
        self._budget.give_back(self._chains.pop(victim, 0))
        # Not noted in `_preempted`, which closes admission; this one made room for an admission.
        return True

    def _preempt(self, victim: Sequence) -> None:
        self._scheduler.preempt(victim)
        self._budget.give_back(self._chains.pop(victim, 0))
        if victim in self._admitted:
            self._admitted.remove(victim)
        self._preempted.append(victim)

    def _fit_draft(self, sequence: Sequence) -> Draft:
        """The sequence's draft, cut to the remaining tokens, the token budget and the free blocks."""
        draft = self._drafts.get(sequence.seq_id)
        if not draft:
            return draft if draft is not None else Draft()
        # The step's own last token needs no guess: k guesses may yield k + 1 tokens.
        fitted = draft.trim(len(draft), sequence.num_remaining_tokens - 1)
        if not fitted:
            return Draft.none("last_token", draft.source)
        fitted = fitted.trim(self._budget.left)
        if not fitted:
            return Draft.none("token_budget", draft.source)
        assert sequence.table is not None
        room = self._pool.num_available * self._pool.block_size + self._pool.capacity(sequence.table)
        fitted = fitted.trim(room - sequence.num_tokens)
        if not fitted:
            return Draft.none("no_blocks", draft.source)
        reserved = self._pool.reserve(sequence.table, sequence.num_tokens + len(fitted))
        assert reserved, "room was counted before"
        self._budget.take(len(fitted))
        return fitted
