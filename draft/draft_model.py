"""A small model as proposer: it says what it would say next, with the target's own noise.

Leviathan, Kalman, Matias, arXiv 2211.17192, with the coupling of Daliri, Musco, Suresh, arXiv 2408.07978: because the
draft model samples with the same noise at the same position, it guesses the target's token whenever the two
distributions are close, at any temperature, and a model that drafts for itself is always right.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from cache_store.block_pool import BlockPool, BlockTable
from cache_store.hashing import root_hash
from draft.growth import Growth, grow
from draft.proposer import DraftContext, Features
from draft.tree import Draft
from target.layout import BatchEntry, lay_out
from target.runner import Runner


@dataclass(slots=True, eq=False)
class _DraftState:
    """How far the draft model's own KV cache has caught up with one sequence."""

    root: bytes
    table: BlockTable | None = None
    num_committed: int = 0
    num_computed: int = 0
    """Committed tokens whose keys and values are in the draft model's pool."""
    cached: tuple[int, ...] | None = None
    """Guesses of the last `propose` that are in the pool behind the committed tokens; None if nothing was drafted."""


class _ModelGrowth(Growth):
    """One draft of the model while it grows."""

    def __init__(self, context: DraftContext, state: _DraftState, limit: int, eos_token_ids: tuple[int, ...]) -> None:
        super().__init__(context, limit=limit, eos_token_ids=eos_token_ids)
        self.state = state


class DraftModelProposer:
    """Drafts trees and chains with a model of its own KV pool, all sequences together, one forward a level.

    Where the model is unsure, several candidates are followed; where it is so unsure that they do not pay, it stops.

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
        # Either may have padded its vocabulary.
        self._target_ids = torch.arange(min(vocab_size, runner.config.vocab_size), device=runner.device)
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
        """Drafts of at most `limits[i]` nodes; empty where the model's context or its pool is too small."""
        drafts: dict[int, Draft] = {}
        growths: list[_ModelGrowth] = []
        asked = {context.seq_id for context in contexts}
        for context, limit in zip(contexts, limits, strict=True):
            state = self._state(context.seq_id)
            state.cached = None
            # Where the last draft was never verified (a preemption), the newest token is computed again for its logits.
            state.num_computed = min(state.num_computed, len(context.token_ids) - 1)
            fitting = min(limit, self._runner.config.max_model_len - len(context.token_ids))
            if fitting <= 0:
                drafts[context.seq_id] = Draft.none("too_long", self.name)
            elif not self._reserve(context, state, fitting, asked):
                drafts[context.seq_id] = Draft.none("no_blocks", self.name)
            else:
                self._states[context.seq_id] = self._states.pop(context.seq_id)
                growths.append(_ModelGrowth(context, state, fitting, self._eos_token_ids))
        for growth in self._catch_up(growths):
            drafts[growth.context.seq_id] = Draft.none("not_ready", self.name)
        growths = [growth for growth in growths if growth.context.seq_id not in drafts]
        if growths:
            self._grow([(growth, [-1]) for growth in growths], [self._first_entry(growth) for growth in growths])
        while growing := [(growth, nodes) for growth in growths if (nodes := growth.tree.next_nodes())]:
            self._grow(growing, [self._next_entry(growth, nodes) for growth, nodes in growing])
        for growth in growths:
            growth.state.cached = growth.cached_token_ids
            drafts[growth.context.seq_id] = growth.tree.draft(self.name)
        return [drafts[context.seq_id] for context in contexts]

    def commit(self, seq_id: int, token_ids: Sequence[int], features: Features | None) -> None:
        """Guesses that were right may be in the pool already."""
        state = self._state(seq_id)
        if state.cached is not None:
            state.num_computed = state.num_committed
            for guess, token_id in zip(state.cached, token_ids, strict=False):
                if guess != token_id:
                    break
                state.num_computed += 1
        state.num_committed += len(token_ids)
        state.cached = None

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

    def _reserve(self, context: DraftContext, state: _DraftState, limit: int, asked: Iterable[int]) -> bool:
        """Room for the committed tokens and all guesses, at the cost of sequences nobody asks about."""
        num_tokens = len(context.token_ids)
        if state.table is None:
            match = self.pool.match(state.root, context.token_ids, num_tokens - 1)
            state.table = self.pool.open(state.root, match)
            state.num_computed = match.num_tokens
        while not self.pool.reserve(state.table, num_tokens + limit):
            idle = next((s for i, s in self._states.items() if i not in asked and s.table and s.table.block_ids), None)
            if idle is None:
                return False
            self._release(idle)
        return True

    def _release(self, state: _DraftState) -> None:
        if state.table is not None:
            self.pool.release(state.table)
        state.table, state.num_computed = None, 0

    def _catch_up(self, growths: Sequence[_ModelGrowth]) -> list[_ModelGrowth]:
        """Compute committed tokens until each sequence lacks only what its first guess computes anyway.

        One forward's worth a call, so that a long new prompt does not hold up the others; returns those still behind.
        """
        budget = self._max_catch_up_tokens
        entries: list[BatchEntry] = []
        behind: list[_ModelGrowth] = []
        for growth in growths:
            state, tokens = growth.state, growth.context.token_ids
            missing = len(tokens) - state.num_computed
            if missing <= _FIRST_GUESS_TOKENS:
                continue
            num_chain = min(missing - 1, budget)
            if num_chain < missing - 1:
                behind.append(growth)
            if num_chain == 0:
                continue
            budget -= num_chain
            assert state.table is not None
            end = state.num_computed + num_chain
            entries.append(BatchEntry(state.num_computed, tokens[state.num_computed : end], state.table.block_ids))
            state.num_computed = end
        if entries:
            self._runner.forward(lay_out(entries, self.pool.block_size))
        for growth in growths:
            assert growth.state.table is not None
            self.pool.commit(growth.state.table, growth.context.token_ids, growth.state.num_computed)
        return behind

    @staticmethod
    def _first_entry(growth: _ModelGrowth) -> BatchEntry:
        """The committed tokens that are left, the last of which says what comes first."""
        state, tokens = growth.state, growth.context.token_ids
        assert state.table is not None
        start, state.num_computed = state.num_computed, len(tokens)
        missing = list(tokens[start:])
        return BatchEntry(start, missing, state.table.block_ids, logits_from=len(missing) - 1)

    @staticmethod
    def _next_entry(growth: _ModelGrowth, nodes: list[int]) -> BatchEntry:
        """The nodes to guess behind."""
        assert growth.state.table is not None
        entry = growth.entry(nodes, len(growth.context.token_ids), growth.state.table.block_ids)
        growth.expanded += nodes
        return entry

    def _grow(self, growing: Sequence[tuple[_ModelGrowth, list[int]]], entries: Sequence[BatchEntry]) -> None:
        """One more level of each tree, in one forward."""
        logits = self._runner.forward(lay_out(entries, self.pool.block_size)).logits
        grow(growing, logits[:, : len(self._target_ids)], self._target_ids)


_FIRST_GUESS_TOKENS = 8
"""A sequence that lacks no more committed tokens than these computes them with its first guess."""
