"""A head that fits is told from one that does not, before anything is served."""

from __future__ import annotations

from pathlib import Path

from draft.config import DraftModelConfig
from draft.draft_model import DraftModelProposer
from speculation.head_check import first_guess_acceptance, misfit_warning
from tests.speculation.scripted import Scripted, liar
from tests.tiny_folder import write_tiny_folder
from tests.tiny_model import TINY, tiny_runner

K1 = DraftModelConfig(num_speculative_tokens=1)


def test_a_model_that_is_the_target_fits_and_a_liar_does_not(tmp_path: Path) -> None:
    """The share of right first guesses is 1 for the target's own copy and 0 for a proposer that is always wrong."""
    folder = write_tiny_folder(tmp_path)
    runner = tiny_runner(num_blocks=100, block_size=4)
    itself = DraftModelProposer(
        tiny_runner(num_blocks=100, block_size=4),
        model_fingerprint="draft",
        vocab_size=TINY.vocab_size,
        eos_token_ids=TINY.eos_token_ids,
    )
    found = first_guess_acceptance(runner, itself, K1, folder)
    assert found == 1.0
    assert misfit_warning("head", found) is None
    assert itself.pool.num_in_use == 0
    wrong = Scripted("draft_model", liar(lambda context, n: [0] * n, TINY.vocab_size))
    warning = misfit_warning("head", first_guess_acceptance(runner, wrong, K1, folder))
    assert warning is not None
    assert "shifting the layers" in warning
    assert misfit_warning("head", None) is None
