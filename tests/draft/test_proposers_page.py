"""The example in docs/proposers.md is a proposer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from draft.config import NgramConfig, SpeculationConfig
from draft.tree import SKIP_REASONS
from speculation.recording import Recording
from speculation.simulate import Simulator, parse_curve

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "proposers.md").read_text()
SOURCE = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)[0]


def example() -> Any:
    """The page's proposer, made from its text."""
    namespace: dict[str, Any] = {}
    exec(compile(SOURCE, "docs/proposers.md", "exec"), namespace)  # noqa: S102 - that the page's own code runs is the test
    return namespace["PairProposer"]()


def test_the_example_is_short() -> None:
    """It fits into 60 lines, imports included."""
    assert len(SOURCE.splitlines()) < 60


def test_the_example_drafts_what_it_has_seen() -> None:
    """A repeated text is guessed from its second time on, by an engine's verbs alone."""
    text = [5, 3, 8, 1, 9, 2]
    recordings = [
        Recording(prompt_token_ids=text, output_token_ids=text * 3, cache_salt=salt) for salt in ("a", "a", "b")
    ]
    replay = Simulator(parse_curve("1:5,32:6"), {"ngram": example()}).run(recordings, NgramConfig())
    assert replay.num_tokens == 54
    assert replay.acceptance_rate > 0.9
    assert replay.tokens_per_step > 3


def test_the_example_keeps_tenants_apart_and_its_verbs_in_order() -> None:
    """What one salt taught is not guessed for another, and a sequence that was not started is refused."""
    proposer = example()
    recording = Recording(prompt_token_ids=[1, 2, 3, 1], output_token_ids=[2, 3, 4], cache_salt="b")
    proposer.start(1000, [1, 2, 3, 9], cache_salt="a")
    replay = Simulator(parse_curve("1:5,32:6"), {"ngram": proposer}).run([recording], NgramConfig())
    assert replay.num_accepted == 1
    with pytest.raises(ValueError, match="sequence 7 was never started"):
        proposer.finish(7)


@pytest.mark.parametrize("config", get_args(SpeculationConfig))
def test_the_page_lists_every_method_with_its_parameters(config: type[msgspec.Struct]) -> None:
    """Each method has a row of the table, which names all its parameters but the one that all share."""
    row = re.search(rf"^\| `{config.__struct_config__.tag}` \|.*$", PAGE, re.MULTILINE)
    assert row is not None
    assert all(f"`{name}`" in row.group() for name in config.__struct_fields__ if name != "num_speculative_tokens")


def test_the_page_lists_every_reason() -> None:
    """Every way a draft can be empty is named."""
    assert [reason for reason in SKIP_REASONS if f"`{reason}`" not in PAGE] == []
