"""EAGLE-3 as proposer: a head that guesses from the target's features (Li et al., arXiv 2503.01840).

Pair i of a sequence is the feature of token i beside token i + 1, so n committed tokens make n - 1 pairs, the last of
which says what comes behind the newest token. The head's KV cache holds pairs of committed tokens alone; guesses are
written behind them and overwritten by the pairs that the target's own features make.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from cache_store.block_pool import BlockPool, BlockTable
from cache_store.hashing import block_hash, root_hash
from draft.backlog import Backlog
from draft.eagle3_head import ChainHead, ChainWish, PairHead
from draft.growing import TREE_WIDTH
from draft.growth import Growth, grow
from draft.proposer import DraftContext, Features
from draft.tree import Draft
from target.layout import BatchEntry, lay_out
from target.noise import noise_keys


@dataclass(slots=True, eq=False)
class _HeadState:
    """How far the head's cache has caught up with one sequence."""

    root: bytes
    num_tokens: int
    backlog: Backlog
    table: BlockTable | None = None
    base: int = 0
    """The first pair that is in the cache: the head attends from there."""
    num_computed: int = 0
    """Pairs [base, num_computed) are in the cache."""


class _PairGrowth(Growth):
    """One draft of pairs while it grows."""

    def __init__(self, context: DraftContext, state: _HeadState, limit: int, eos_token_ids: tuple[int, ...]) -> None:
        super().__init__(context, limit=limit, eos_token_ids=eos_token_ids)
        self.state = state
        self.outputs: dict[int, torch.Tensor] = {}
        """[E] the head's output at the root (-1) and at expanded nodes."""

    @property
    def num_pairs(self) -> int:
        return len(self.context.token_ids) - 1

    @property
    def is_simple(self) -> bool:
        """Whether its levels are each behind the likeliest guess of the one before.

        So are chains, and trees whose size nobody has asked for: what stands beside the chain comes for nothing, and
        what would stand behind that seldom pays.
        """
        is_near = self.num_pairs - self.state.num_computed <= _FIRST_GUESS_PAIRS
        return is_near and not (self.bounds.is_fixed and self.tree.width > 1) and not self.context.sampling.has_edits

    @property
    def wish(self) -> ChainWish:
        """Filters (top_p and so on) are left out: what they cut off is seldom the choice."""
        depth, sampling = self.tree.depth, self.context.sampling
        min_chance = max(self.context.min_confidence, self.context.min_reach)
        if sampling.is_greedy:
            return ChainWish(depth, min_chance, self.stops)
        positions = len(self.context.token_ids) + np.arange(depth)
        keys = noise_keys(np.full(depth, sampling.seed, np.uint64), positions).tolist()
        return ChainWish(depth, min_chance, self.stops, sampling.temperature, keys)


class Eagle3Proposer:
    """Drafts trees and chains for all sequences together, one forward of the head a level.

    Every call lets the head's cache catch up with the committed tokens whose features are known. Features that the
    target did not compute, because a prefix hit spared it, are made up for by the head's own prefix cache if that has
    them; otherwise the head attends only from where its features begin.
    """

    name = "eagle3"

    def __init__(
        self,
        head: PairHead,
        *,
        eos_token_ids: tuple[int, ...],
        max_catch_up_tokens: int = 512,
        max_pairs_behind: int = 1 << 20,
    ) -> None:
        """`eos_token_ids` are the target's; at most `max_catch_up_tokens` pairs are computed before the first guess.

        Of a sequence that is more than `max_pairs_behind` pairs behind, after a long prompt or because nobody asked for
        drafts, the oldest are given up: the head then attends only from there.
        """
        self.needs_features = head.config.feature_layers
        self._head = head
        self._chain_head = head if isinstance(head, ChainHead) else None
        self._eos_token_ids = eos_token_ids
        self._max_catch_up_tokens = max_catch_up_tokens
        self._max_pairs_behind = max_pairs_behind
        self._no_features = torch.empty(0, len(self.needs_features) * head.config.layer.hidden_size)
        self.pool = BlockPool(head.kv_pool.num_blocks, head.kv_pool.block_size)
        self._states: dict[int, _HeadState] = {}
        """Least recently drafted first."""

    def start(
        self, seq_id: int, prompt_token_ids: Sequence[int], *, cache_salt: str = "", prediction: Sequence[int] = ()
    ) -> None:
        """Raises ValueError for a sequence that is here already."""
        if seq_id in self._states:
            raise ValueError(f"sequence {seq_id} was started already")
        # A block of pairs depends on the tokens behind the first; that one goes into the root.
        root = block_hash(root_hash(self.name, cache_salt), prompt_token_ids[:1])
        self._states[seq_id] = _HeadState(root, len(prompt_token_ids), Backlog(self._max_pairs_behind))

    def commit(self, seq_id: int, token_ids: Sequence[int], features: Features | None) -> None:
        """Features are kept until somebody asks for a draft."""
        state = self._state(seq_id)
        state.num_tokens += len(token_ids)
        if features is not None and not state.backlog.add(features, self._head.fuse):
            self._release(state)

    def finish(self, seq_id: int) -> None:
        """Its blocks are free or cached when this returns."""
        self._release(self._state(seq_id))
        del self._states[seq_id]

    def propose(self, contexts: Sequence[DraftContext], limits: Sequence[int]) -> list[Draft]:
        """Drafts of at most `limits[i]` nodes; empty where features are missing, or context or pool are too small."""
        drafts: dict[int, Draft] = {}
        growths: list[_PairGrowth] = []
        asked = {context.seq_id for context in contexts}
        for context, limit in zip(contexts, limits, strict=True):
            growth = self._growth(context, limit)
            reason = self._obstacle(growth, asked)
            if reason is None:
                growths.append(growth)
            else:
                drafts[context.seq_id] = Draft.none(reason, self.name)
        behind = self._grow(growths)
        for growth in growths:
            is_behind = growth in behind
            draft = Draft.none("not_ready", self.name) if is_behind else growth.tree.draft(self.name)
            drafts[growth.context.seq_id] = draft
        return [drafts[context.seq_id] for context in contexts]

    def _grow(self, growths: Sequence[_PairGrowth]) -> list[_PairGrowth]:
        """Grow the trees of all that can be caught up with; returns the others."""
        if self._chain_head and (simple := [growth for growth in growths if growth.is_simple]):
            self._guess(self._chain_head, simple)
            growths = [growth for growth in growths if growth not in simple]
        if not growths:
            return []
        self._fuse(growths)
        behind = self._catch_up(growths)
        growths = [growth for growth in growths if growth not in behind]
        if growths:
            self._first_level(growths)
        while growing := [(growth, nodes) for growth in growths if (nodes := growth.tree.next_nodes())]:
            self._next_level(growing)
        return behind

    def _guess(self, head: ChainHead, growths: Sequence[_PairGrowth]) -> None:
        """Whole drafts in one call: new features are fused, and then comes one level behind the other."""
        for growth in growths:
            growth.state.num_computed = min(growth.state.num_computed, growth.num_pairs - 1)
        entries = [self._entry(growth, growth.num_pairs, logits=True) for growth in growths]
        hidden = torch.empty(sum(len(entry.chain) for entry in entries), head.config.layer.hidden_size)
        sources: list[int] = []
        raw = [self._no_features]
        starts = [0]
        for growth in growths:
            backlog, start, end = growth.state.backlog, growth.state.num_computed, growth.num_pairs
            first_raw, offset = backlog.fused_end, starts[-1]
            if start < first_raw:
                at, known = len(sources), backlog.rows(start, min(first_raw, end))
                hidden[at : at + known.size(0)] = known
            sources += [offset + i - first_raw if i >= first_raw else -1 for i in range(start, end)]
            if (rows := backlog.raw()) is not None:
                raw.append(rows)
            starts.append(offset + backlog.end - first_raw)
        batch, wishes = lay_out(entries, self.pool.block_size), [growth.wish for growth in growths]
        # How likely a guess is with noise shows only beside others.
        width = max(
            TREE_WIDTH if wish.keys else growth.tree.width for growth, wish in zip(growths, wishes, strict=True)
        )
        fused, levels = head.guess(batch, hidden, torch.cat(raw), np.array(sources, np.int64), wishes, width)
        for growth, guesses, (start, end) in zip(growths, levels, pairwise(starts), strict=True):
            if start < end:
                growth.state.backlog.set_fused(fused[start:end])
            growth.state.num_computed = growth.num_pairs
            self._note_computed(growth)
            growth.tree.grow_along(guesses)

    def _state(self, seq_id: int) -> _HeadState:
        state = self._states.get(seq_id)
        if state is None:
            raise ValueError(f"sequence {seq_id} was not started, or has finished")
        return state

    def _growth(self, context: DraftContext, limit: int) -> _PairGrowth:
        state = self._state(context.seq_id)
        if len(context.token_ids) != state.num_tokens:
            raise ValueError(f"sequence {context.seq_id} has uncommitted tokens; commit comes before propose")
        self._states[context.seq_id] = self._states.pop(context.seq_id)
        limit = min(limit, self._head.config.layer.max_model_len - len(context.token_ids))
        return _PairGrowth(context, state, limit, self._eos_token_ids)

    def _obstacle(self, growth: _PairGrowth, asked: Iterable[int]) -> str | None:
        """Why nothing can be drafted; None if the cache has room for the pairs and all guesses."""
        state = growth.state
        if growth.limit <= 0:
            return "too_long"
        if not state.backlog.start <= max(growth.num_pairs - 1, 0) < state.backlog.end:
            return "not_ready"
        if state.num_computed < state.backlog.start:
            self._release(state)
        if state.table is None:
            self._open(growth)
        assert state.table is not None
        while not self.pool.reserve(state.table, growth.num_pairs - state.base + growth.limit):
            idle = next((s for i, s in self._states.items() if i not in asked and s.table and s.table.block_ids), None)
            if idle is None:
                return "no_blocks"
            self._release(idle)
        return None

    def _open(self, growth: _PairGrowth) -> None:
        """Begin a block table: with what the cache has of the sequence, or where its features begin."""
        state, backlog = growth.state, growth.state.backlog
        # The last pair is always computed, for its output.
        match = self.pool.match(state.root, growth.context.token_ids[1:], growth.num_pairs - 1)
        if match.num_tokens >= backlog.start:
            state.table, state.base = self.pool.open(state.root, match), 0
            state.num_computed = match.num_tokens
        else:
            state.table = self.pool.open(state.root)
            state.base = state.num_computed = backlog.start

    def _release(self, state: _HeadState) -> None:
        if state.table is not None:
            self.pool.release(state.table)
        state.table = None

    def _fuse(self, growths: Sequence[_PairGrowth]) -> None:
        """Fuse what is new of all sequences in one product."""
        waiting = [(growth.state.backlog, raw) for growth in growths if (raw := growth.state.backlog.raw()) is not None]
        if not waiting:
            return
        fused = self._head.fuse(torch.cat([raw for _, raw in waiting]))
        for (backlog, _), rows in zip(waiting, fused.split([len(raw) for _, raw in waiting]), strict=True):
            backlog.set_fused(rows)

    def _catch_up(self, growths: Sequence[_PairGrowth]) -> list[_PairGrowth]:
        """Compute pairs until each sequence lacks only what its first guess computes anyway.

        One forward's worth a call, so that a long new prompt does not hold up the others; returns those still behind.
        """
        budget = self._max_catch_up_tokens
        parts: list[tuple[_PairGrowth, int]] = []
        behind: list[_PairGrowth] = []
        for growth in growths:
            missing = growth.num_pairs - growth.state.num_computed
            if missing <= _FIRST_GUESS_PAIRS:
                continue
            num_chain = min(missing - 1, budget)
            budget -= num_chain
            if num_chain < missing - 1:
                behind.append(growth)
            if num_chain:
                parts.append((growth, num_chain))
        if parts:
            self._compute([(growth, self._chain(growth, growth.state.num_computed + count)) for growth, count in parts])
            for growth, num_chain in parts:
                growth.state.num_computed += num_chain
        for growth in growths:
            self._note_computed(growth)
        return behind

    def _first_level(self, growths: Sequence[_PairGrowth]) -> None:
        """The pairs that are left, the last of which says what comes first."""
        for growth in growths:
            # Where the last draft was never verified (a preemption), the last pair is computed again.
            growth.state.num_computed = min(growth.state.num_computed, growth.num_pairs - 1)
        entries = [(growth, self._chain(growth, growth.num_pairs, logits=True)) for growth in growths]
        logits, outputs = self._compute(entries)
        for growth, output in zip(growths, outputs, strict=True):
            growth.outputs[-1] = output
            growth.state.num_computed = growth.num_pairs
            self._note_computed(growth)
        grow([(growth, [-1]) for growth in growths], logits, self._head.target_ids)

    def _next_level(self, growing: Sequence[tuple[_PairGrowth, list[int]]]) -> None:
        """Guess behind the given nodes of each tree."""
        logits, outputs = self._compute([(growth, self._expansion(growth, nodes)) for growth, nodes in growing])
        places = [(growth, node) for growth, nodes in growing for node in nodes]
        for (growth, node), output in zip(places, outputs, strict=True):
            growth.expanded.append(node)
            growth.outputs[node] = output
        grow(growing, logits, self._head.target_ids)

    def _chain(self, growth: _PairGrowth, end: int, *, logits: bool = False) -> tuple[BatchEntry, torch.Tensor]:
        """The pairs of committed tokens before pair `end` that are not in the cache, and their fused features."""
        return self._entry(growth, end, logits=logits), growth.state.backlog.rows(growth.state.num_computed, end)

    def _entry(self, growth: _PairGrowth, end: int, *, logits: bool) -> BatchEntry:
        """Those pairs; `logits` are wanted of the last."""
        state, start = growth.state, growth.state.num_computed
        assert state.table is not None
        chain = growth.context.token_ids[start + 1 : end + 1]
        return BatchEntry(
            start - state.base, chain, state.table.block_ids, logits_from=end - start - 1 if logits else None
        )

    def _expansion(self, growth: _PairGrowth, nodes: list[int]) -> tuple[BatchEntry, torch.Tensor]:
        """Rows for the nodes, each with what the head put out at its parent."""
        state, tree = growth.state, growth.tree
        assert state.table is not None
        entry = growth.entry(nodes, growth.num_pairs - state.base, state.table.block_ids)
        if not entry.tree:
            return entry, growth.outputs[tree.parents[nodes[0]]][None]
        outputs = [growth.outputs[tree.parents[node]] for node in (*growth.expanded, *nodes)]
        return entry, torch.cat((state.backlog.rows(growth.num_pairs - 1, growth.num_pairs), torch.stack(outputs)))

    def _compute(
        self, parts: Sequence[tuple[_PairGrowth, tuple[BatchEntry, torch.Tensor]]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        batch = lay_out([entry for _, (entry, _) in parts], self.pool.block_size)
        return self._head.forward(batch, torch.cat([hidden for _, (_, hidden) in parts]))

    def _note_computed(self, growth: _PairGrowth) -> None:
        """Index the full blocks of a sequence that the cache has from its beginning, and let go of used features."""
        state = growth.state
        assert state.table is not None
        if state.base == 0 and state.num_computed // self.pool.block_size > len(state.table.hashes):
            self.pool.commit(state.table, growth.context.token_ids[1:], state.num_computed)
        state.backlog.drop_before(min(state.num_computed, growth.num_pairs - 1))


_FIRST_GUESS_PAIRS = 8
"""A sequence that lacks no more pairs than these computes them with its first guess."""
