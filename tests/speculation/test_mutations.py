"""Mistakes that must be noticed: each mutation of the product turns a scenario of the suite red."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest

from cache_store.block_pool import BlockPool, BlockTable
from draft.tree import Draft
from speculation import engine, sequence, verify
from speculation.scheduler import Scheduler, StepPlan
from target.sampling import SamplingRow
from tests.cache_store import test_block_pool
from tests.speculation import test_engine
from tests.speculation.running import SAMPLINGS


def drafted(shape: str, sampling: str) -> None:
    """The scenario that compares six drafted sequences with the plain loop."""
    test_engine.test_every_proposer_gives_the_plain_loops_tokens(shape, SAMPLINGS[sampling], 4, 64)


def accept_larger_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept a guess on >= instead of equality of ids."""

    def walk(draft: Draft, choices: Sequence[int]) -> verify.Verdict:
        path, token_ids, node = [], [choices[0]], -1
        for child, parent in enumerate(draft.parents):
            if parent == node and draft.token_ids[child] >= choices[1 + node]:
                path.append(child)
                token_ids[-1:] = [draft.token_ids[child], choices[1 + child]]
                node = child
        return verify.Verdict(tuple(path), tuple(token_ids))

    monkeypatch.setattr(engine, "walk", walk)


def forget_the_trim(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the blocks that rejected guesses took."""
    monkeypatch.setattr(BlockPool, "trim", lambda self, table, num_tokens: None)


def hash_draft_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Index a block beyond the committed tokens, as if the guesses in it had been accepted."""
    commit = BlockPool.commit

    def with_guesses(self: BlockPool, table: BlockTable, token_ids: Sequence[int], num_computed: int) -> None:
        extended = [*token_ids[:num_computed], *[0] * self.block_size]
        commit(self, table, extended, min(num_computed + 1, len(table.block_ids) * self.block_size))

    monkeypatch.setattr(BlockPool, "commit", with_guesses)


def evict_most_recently_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evict from the wrong end of the queue."""

    def allocate(self: BlockPool) -> int:
        if self._free:
            block_id = self._free.pop()
        else:
            block_id, _ = self._cached.popitem(last=True)
            self._forget(block_id)
        self._ref_counts[block_id] = 1
        return block_id

    monkeypatch.setattr(BlockPool, "_allocate", allocate)


def penalise_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute penalties from the committed tokens alone, not along each node's path."""
    init = SamplingRow.__init__

    def without_path(self: SamplingRow, *args: object, **values: object) -> None:
        init(self, *args, **values)  # type: ignore[arg-type]
        object.__setattr__(self, "path", ())

    monkeypatch.setattr(SamplingRow, "__init__", without_path)


def forget_the_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the accepted path of a tree where it was computed."""
    monkeypatch.setattr("tests.speculation.token_runner.TokenKV.move", lambda self, sources, destinations: None)


def share_over_salts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root every tenant's block hashes in the same place."""
    monkeypatch.setattr("speculation.scheduler.root_hash", lambda fingerprint, salt: bytes(16))


def match_the_whole_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve a prefix hit that leaves no token to compute."""
    match = BlockPool.match
    monkeypatch.setattr(BlockPool, "match", lambda self, root, tokens, most: match(self, root, tokens, most + 2))


def compute_prompts_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the step's tokens to the most urgent sequences, whether they decode or are far behind."""
    plan = Scheduler.plan

    def in_order_of_urgency(self: Scheduler, drafts: Mapping[int, Draft]) -> StepPlan:
        with monkeypatch.context() as patch:
            patch.setattr(sequence.Sequence, "is_decoding", True)
            return plan(self, drafts)

    monkeypatch.setattr(Scheduler, "plan", in_order_of_urgency)


SCENARIOS: list[tuple[Callable[[pytest.MonkeyPatch], None], Callable[[], None]]] = [
    (accept_larger_ids, lambda: drafted("coin", "greedy")),
    (forget_the_trim, test_engine.test_liar_costs_no_token),
    (hash_draft_tokens, test_engine.test_draft_tokens_are_never_hashed),
    (evict_most_recently_used, test_block_pool.test_least_recently_used_prefix_is_evicted_first),
    (penalise_once_a_step, lambda: drafted("oracle", "penalties")),
    (penalise_once_a_step, lambda: drafted("bushy", "repetition")),
    (forget_the_move, lambda: drafted("bushy", "greedy")),
    (share_over_salts, test_engine.test_salts_do_not_share_blocks),
    (match_the_whole_prompt, test_engine.test_prefix_hits_leave_a_token_to_compute),
    (compute_prompts_first, test_engine.test_streams_go_on_while_a_long_prompt_is_computed),
]


@pytest.mark.parametrize(
    ("mutate", "scenario"), SCENARIOS, ids=[f"{m.__name__}-{i}" for i, (m, _) in enumerate(SCENARIOS)]
)
def test_mutation_is_noticed(
    mutate: Callable[[pytest.MonkeyPatch], None], scenario: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scenario passes as the product is, and fails with the mistake in it."""
    scenario()
    mutate(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        scenario()
