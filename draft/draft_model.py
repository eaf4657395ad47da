"""A small model as proposer: it says what it would say next, with the target's own noise.

Leviathan, Kalman, Matias, arXiv 2211.17192, with the coupling of Daliri, Musco, Suresh, arXiv 2408.07978: because the
draft model samples with the same noise at the same position, it guesses the target's token whenever the two
distributions are close, at any temperature, and a model that drafts for itself is always right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cache_store.block_pool import BlockPool, BlockTable
from cache_store.hashing import root_hash
from draft.proposer import DraftContext, Features
from draft.tree import Draft
from target.layout import BatchEntry, lay_out
from target.runner import Runner
from target.sampling import SamplingRow, TokenCounts, sample


@dataclass(slots=True, eq=False)
class _DraftState:
    """How far the draft model's own KV cache has caught up with one sequence."""

    root: bytes
    table: BlockTable | None = None
    num_committed: int = 0
    num_computed: int = 0
    """Committed tokens whose keys and values are in the draft model's pool."""
    drafted: tuple[int, ...] = ()
    """The guesses of the last `propose`; all but the last are in the pool behind the committed tokens."""


@dataclass(slots=True)
class _Chain:
    """One draft while it grows."""

    context: DraftContext
    state: _DraftState
    limit: int
    stops: frozenset[int]
    counts: TokenCounts | None
    token_ids: list[int] = field(default_factory=list)

    @property
    def wants_more(self) -> bool:
        return len(self.token_ids) < self.limit and not (self.token_ids and self.token_ids[-1] in self.stops)


class DraftModelProposer:
    """Drafts chains with a model of its own KV pool, all sequences together, one forward a guess.

    It obeys the engine's rule: every call lets `num_computed` catch up with the committed tokens first, whatever the
    reason it is behind (a new prompt, steps in which it was not asked, a last guess that was accepted).
    """

    name = "draft_model"
    needs_features: tuple[int, ...] = ()

    def __init__(
        self,
        runner: Runner,
        *,
        model_fingerprint: str,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        max_catch_up_tokens: int = 512,
    ) -> None:
        """`vocab_size` and `eos_token_ids` are the target's. A forward catches up by at most `max_catch_up_tokens`."""
        self._runner = runner
        self._fingerprint = model_fingerprint
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._max_catch_up_tokens = max_catch_up_tokens
        self.pool = BlockPool(runner.kv_pool.num_blocks, runner.kv_pool.block_size)
        self._states: dict[int, _DraftState] = {}
        """Least recently drafted first."""

    def start(
        self, seq_id: int, prompt_token_ids: Sequence[int], *, cache_salt: str = "", prediction: Sequence[int] = ()
    ) -> None:
        """Raises ValueError for a sequence that is here already."""
        if seq_id in self._states:
            raise ValueError(f"sequence {seq_id} was started already")
        self._states[seq_id] = _DraftState(
            root_hash(self._fingerprint, cache_salt), num_committed=len(prompt_token_ids)
        )

    def propose(self, contexts: Sequence[DraftContext], limits: Sequence[int]) -> list[Draft]:
        """Chains of at most `limits[i]` tokens; empty where the model's context or its pool is too small."""
        drafts: dict[int, Draft] = {}
        chains: list[_Chain] = []
        asked = {context.seq_id for context in contexts}
        for context, limit in zip(contexts, limits, strict=True):
            state = self._state(context.seq_id)
            state.drafted = ()
            # Where the last draft was never verified (a preemption), the newest token is computed again for its logits.
            state.num_computed = min(state.num_computed, len(context.token_ids) - 1)
            fitting = min(limit, self._runner.config.max_model_len - len(context.token_ids))
            if fitting <= 0:
                drafts[context.seq_id] = Draft.none("too_long", self.name)
            elif not self._reserve(context, state, fitting, asked):
                drafts[context.seq_id] = Draft.none("no_blocks", self.name)
            else:
                chains.append(self._chain(context, state, fitting))
        for chain in self._catch_up(chains):
            drafts[chain.context.seq_id] = Draft.none("not_ready", self.name)
        while growing := [chain for chain in chains if chain.wants_more and chain.context.seq_id not in drafts]:
            self._grow(growing)
        for chain in chains:
            chain.state.drafted = tuple(chain.token_ids)
            drafts.setdefault(chain.context.seq_id, Draft.chain(tuple(chain.token_ids), self.name))
        return [drafts[context.seq_id] for context in contexts]

    def commit(self, seq_id: int, token_ids: Sequence[int], features: Features | None) -> None:
        """Guesses that were right are in the pool already, all but the last of them."""
        state = self._state(seq_id)
        num_right = 0
        for guess, token_id in zip(state.drafted, token_ids, strict=False):
            if guess != token_id:
                break
            num_right += 1
        if state.drafted:
            state.num_computed = state.num_committed + min(num_right, len(state.drafted) - 1)
        state.num_committed += len(token_ids)
        state.drafted = ()

    def finish(self, seq_id: int) -> None:
        """Its blocks are free or cached when this returns."""
        state = self._state(seq_id)
        self._release(state)
        del self._states[seq_id]

    def _state(self, seq_id: int) -> _DraftState:
        state = self._states.get(seq_id)
        if state is None:
            raise ValueError(f"sequence {seq_id} was not started, or has finished")
        return state

    def _chain(self, context: DraftContext, state: _DraftState, limit: int) -> _Chain:
        self._states[context.seq_id] = self._states.pop(context.seq_id)
        counts = None
        if context.sampling.has_penalties:
            prompt, output = (
                context.token_ids[: context.num_prompt_tokens],
                context.token_ids[context.num_prompt_tokens :],
            )
            counts = TokenCounts(frozenset(prompt), Counter(output))
        stops = context.sampling.all_stop_token_ids(self._eos_token_ids)
        return _Chain(context, state, limit, stops, counts)

    def _reserve(self, context: DraftContext, state: _DraftState, limit: int, asked: Iterable[int]) -> bool:
        """Room for the committed tokens and all guesses but the last, at the cost of sequences nobody asks about."""
        num_tokens = len(context.token_ids)
        if state.table is None:
            match = self.pool.match(state.root, context.token_ids, num_tokens - 1)
            state.table = self.pool.open(state.root, match)
            state.num_computed = match.num_tokens
        while not self.pool.reserve(state.table, num_tokens + limit - 1):
            idle = next((s for i, s in self._states.items() if i not in asked and s.table and s.table.block_ids), None)
            if idle is None:
                return False
            self._release(idle)
        return True

    def _release(self, state: _DraftState) -> None:
        if state.table is not None:
            self.pool.release(state.table)
        state.table, state.num_computed = None, 0

    def _catch_up(self, chains: Sequence[_Chain]) -> list[_Chain]:
        """Compute committed tokens until each chain lacks only what its first guess computes anyway.

        One forward's worth a call, so that a long new prompt does not hold up the others; returns those still behind.
        """
        budget = self._max_catch_up_tokens
        entries: list[BatchEntry] = []
        behind: list[_Chain] = []
        for chain in chains:
            state, tokens = chain.state, chain.context.token_ids
            missing = len(tokens) - state.num_computed
            if missing <= _FIRST_GUESS_CHAIN:
                continue
            num_chain = min(missing - 1, budget)
            if num_chain < missing - 1:
                behind.append(chain)
            if num_chain == 0:
                continue
            budget -= num_chain
            assert state.table is not None
            end = state.num_computed + num_chain
            entries.append(BatchEntry(state.num_computed, tokens[state.num_computed : end], state.table.block_ids))
            state.num_computed = end
        if entries:
            self._runner.forward(lay_out(entries, self.pool.block_size))
        for chain in chains:
            assert chain.state.table is not None
            self.pool.commit(chain.state.table, chain.context.token_ids, chain.state.num_computed)
        return behind

    def _grow(self, chains: Sequence[_Chain]) -> None:
        """One more guess for each chain, in one forward."""
        entries, rows = [], []
        for chain in chains:
            assert chain.state.table is not None
            num_tokens = len(chain.context.token_ids)
            if chain.token_ids:
                start, tokens = num_tokens + len(chain.token_ids) - 1, chain.token_ids[-1:]
            else:
                start, tokens = chain.state.num_computed, list(chain.context.token_ids[chain.state.num_computed :])
                chain.state.num_computed = num_tokens
            entries.append(BatchEntry(start, tokens, chain.state.table.block_ids, logits_from=len(tokens) - 1))
            rows.append(
                SamplingRow.after(
                    tuple(chain.token_ids),
                    params=chain.context.sampling,
                    num_tokens=num_tokens,
                    num_prompt_tokens=chain.context.num_prompt_tokens,
                    stop_token_ids=chain.stops,
                    counts=chain.counts,
                )
            )
        logits = self._runner.forward(lay_out(entries, self.pool.block_size)).logits[:, : self._vocab_size]
        for chain, token_id in zip(chains, sample(logits, rows).token_ids, strict=True):
            chain.token_ids.append(token_id)


_FIRST_GUESS_CHAIN = 8
"""A chain that lacks no more committed tokens than these computes them with its first guess."""
