"""A hypothesis state machine over scheduler and pool: any order of submissions, aborts, steps and shrinking room."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache_store.block_pool import BlockPool, BlockTable
from draft.config import NoSpeculation
from draft.tree import Draft
from speculation.messages import SamplingParams, Submit
from speculation.scheduler import Scheduler
from speculation.sequence import Sequence
from speculation.verify import walk

NUM_BLOCKS, BLOCK_SIZE, BUDGET, MAX_SEQS = 13, 2, 9, 4


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    """A random tree of up to six nodes over three tokens."""
    parents = [draw(st.integers(-1, i - 1)) for i in range(draw(st.integers(0, 6)))]
    tokens = draw(st.lists(st.integers(0, 2), min_size=len(parents), max_size=len(parents)))
    return Draft(tuple(tokens), tuple(parents), "random")


class SchedulerMachine(RuleBasedStateMachine):
    """Plays the engine's part with arbitrary verdicts, and checks every invariant after every rule."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        self.scheduler = Scheduler(
            self.pool, max_num_seqs=MAX_SEQS, max_num_batched_tokens=BUDGET, model_fingerprint="machine"
        )
        self.live: dict[int, Sequence] = {}
        self.hogs: list[BlockTable] = []
        self.num_sequences = 0
        self.said: dict[int, list[int]] = {}

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=10),
        max_tokens=st.integers(1, 8),
        priority=st.integers(0, 2),
        salt=st.sampled_from(["", "other"]),
    )
    def submit(self, prompt: list[int], max_tokens: int, priority: int, salt: str) -> None:
        request = Submit(
            request_id=str(self.num_sequences),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens),
            priority=priority,
            cache_salt=salt,
        )
        sequence = Sequence(self.num_sequences, request, NoSpeculation(), 0.0)
        self.num_sequences += 1
        self.live[sequence.seq_id] = sequence
        self.said[sequence.seq_id] = list(prompt)
        self.scheduler.add(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self._remove(self.live[data.draw(st.sampled_from(sorted(self.live)))])

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Plan with random drafts, then commit what a random target says."""
        guesses = {s.seq_id: data.draw(drafts()) for s in self.scheduler.ready_for_draft()}
        plan = self.scheduler.plan(guesses)
        assert sum(s.num_chain + len(s.draft) for s in plan.scheduled) <= BUDGET
        for scheduled in plan.scheduled:
            sequence, draft = scheduled.sequence, scheduled.draft
            assert sequence.table is not None
            assert not draft or scheduled.completes
            needed = sequence.num_computed_tokens + scheduled.num_chain + len(draft)
            assert self.pool.capacity(sequence.table) >= needed
            completes = scheduled.completes
            sequence.num_computed_tokens += scheduled.num_chain
            if completes:
                choices = data.draw(st.lists(st.integers(0, 2), min_size=1 + len(draft), max_size=1 + len(draft)))
                verdict = walk(draft, choices)
                assert len(verdict.token_ids) <= sequence.num_remaining_tokens
                sequence.append(list(verdict.token_ids))
                self.said[sequence.seq_id] += verdict.token_ids
                sequence.num_computed_tokens += len(verdict.token_ids) - 1
                assert sequence.num_computed_tokens == sequence.num_tokens - 1
            self.pool.trim(sequence.table, max(sequence.num_tokens, sequence.num_computed_tokens))
            self.pool.commit(sequence.table, sequence.token_ids, sequence.num_computed_tokens)
            if sequence.num_remaining_tokens == 0:
                self._remove(sequence)

    @rule()
    def shrink(self) -> None:
        """Somebody else takes a block, as long as the longest sequence could still run alone."""
        if self.pool.num_usable - len(self.hogs) > -(-19 // BLOCK_SIZE):
            hog = self.pool.open(b"hog")
            if self.pool.reserve(hog, BLOCK_SIZE):
                self.hogs.append(hog)
            else:
                self.pool.release(hog)

    @precondition(lambda self: self.hogs)
    @rule()
    def grow(self) -> None:
        self.pool.release(self.hogs.pop())

    @invariant()
    def pool_is_whole(self) -> None:
        self.pool.check()
        running = sum(len(s.table.block_ids) for s in self.live.values() if s.table is not None)
        assert self.pool.num_in_use <= running + len(self.hogs)

    @invariant()
    def sequences_are_where_they_belong(self) -> None:
        scheduler = self.scheduler
        assert {s.seq_id for s in scheduler.running} | {s.seq_id for s in scheduler.waiting} == set(self.live)
        assert len(scheduler.running) + len(scheduler.waiting) == len(self.live)
        assert len(scheduler.running) <= MAX_SEQS
        for sequence in self.live.values():
            assert sequence.token_ids == self.said[sequence.seq_id]
            assert (sequence.table is None) == (sequence in scheduler.waiting)
            assert sequence.table is not None or sequence.num_computed_tokens == 0
        for queue in (scheduler.running, scheduler.waiting):
            assert [s.urgency for s in queue] == sorted(s.urgency for s in queue)

    @invariant()
    def hits_find_committed_tokens_alone(self) -> None:
        """Whatever the index finds for a prefix of committed tokens was computed for exactly those tokens."""
        for sequence in self.live.values():
            tokens = sequence.token_ids
            match = self.pool.match(self.scheduler.root_of(sequence), tokens, len(tokens))
            assert match.num_tokens <= len(tokens)
            if sequence.table is not None:
                full = sequence.num_computed_tokens // BLOCK_SIZE
                assert len(sequence.table.hashes) == full

    def teardown(self) -> None:
        """Everything can finish: with the room back, nothing starves and every block returns."""
        while self.hogs:
            self.pool.release(self.hogs.pop())
        for _ in range(500):
            if not self.live:
                break
            self._plain_step()
        assert not self.live, "sequences starve"
        assert self.pool.num_in_use == 0

    def _plain_step(self) -> None:
        for scheduled in self.scheduler.plan({}).scheduled:
            sequence = scheduled.sequence
            assert sequence.table is not None
            completes = scheduled.completes
            sequence.num_computed_tokens += scheduled.num_chain
            if completes:
                sequence.append([0])
                self.said[sequence.seq_id].append(0)
            self.pool.commit(sequence.table, sequence.token_ids, sequence.num_computed_tokens)
            if sequence.num_remaining_tokens == 0:
                self._remove(sequence)

    def _remove(self, sequence: Sequence) -> None:
        del self.live[sequence.seq_id]
        self.scheduler.remove(sequence)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.__doc__ = (
    "No order of submissions, aborts, steps and shrinking room breaks an invariant or starves anybody."
)
TestSchedulerMachine.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
