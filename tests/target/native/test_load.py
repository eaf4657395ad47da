"""Which models the native step takes, and what it says of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from target.layout import BatchEntry
from target.native.isa import ISAS, supported_isas
from target.native.load import NativeUnsupported, load_native_runner, unsupported_reason
from tests.target.forwards import run
from tests.target.native.conftest import MakeRunner, ModelOf
from tests.target.native.test_packing import CONFIG


@pytest.mark.parametrize(
    ("changes", "block_size", "reason"),
    [
        ({}, 16, None),
        ({"sliding_window": 64}, 16, "sliding_window is 64"),
        ({"hidden_size": 48}, 16, "hidden_size is 48; the native step needs a multiple of 32"),
        ({"head_size": 80}, 16, "head_size is 80"),
        ({}, 8, "block_size is 8; the native step needs a multiple of 16"),
    ],
)
def test_what_it_cannot_compute_has_a_reason(changes: dict[str, int], block_size: int, reason: str | None) -> None:
    """A model or a block size outside the kernels' layout is declined with the field, its value and what would do."""
    found = unsupported_reason(msgspec.structs.replace(CONFIG, **changes), block_size)
    assert (found is None) if reason is None else reason in (found or "")


def test_loading_an_unsupported_model_raises_the_reason(model_of: ModelOf) -> None:
    """The caller that wants to fall back catches one exception."""
    config, weights = model_of("mistral")
    with pytest.raises(NativeUnsupported, match="sliding_window"):
        load_native_runner(config, weights, num_blocks=4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization": "q3"}, "quantization is 'q3'; it must be one of auto, none, int8, q4"),
        ({"num_threads": 0}, "num_threads is 0"),
        ({"isa": "neon"}, "isa is 'neon'; this processor has avx2"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], message: str, model_of: ModelOf) -> None:
    """The error names the argument, its value and what would be right."""
    with pytest.raises(ValueError, match=message):
        load_native_runner(*model_of("llama"), num_blocks=4, **changes)


def test_auto_is_int8_for_float_weights_and_the_best_instruction_set(
    model_of: ModelOf, make_runner: MakeRunner
) -> None:
    """The description, for the start-up log, says what was chosen."""
    runner = make_runner(model_of("llama"), num_threads=1)
    best = max(supported_isas())
    assert "Q8_0 x int16" in runner.description
    assert next(name for name, number in ISAS.items() if number == best) in runner.description


def test_a_cache_folder_that_cannot_be_written_is_done_without(
    model_of: ModelOf, make_runner: MakeRunner, tmp_path: Path
) -> None:
    """The runner compiles into memory and works."""
    (tmp_path / "file").touch()
    runner = make_runner(model_of("llama"), num_threads=1, cache_dir=tmp_path / "file")
    assert run(runner, BatchEntry(0, [1, 2], [1], logits_from=0)).shape == (2, 211)


def test_machine_code_is_compiled_once(model_of: ModelOf, tmp_path: Path) -> None:
    """The first runner of a cache folder reports that it compiles, the second does not."""
    told: list[str] = []
    for _ in range(2):
        config, weights = model_of("llama")
        runner = load_native_runner(
            config, weights, num_blocks=4, num_threads=1, cache_dir=tmp_path, progress=told.append
        )
        runner.close()
    assert len(told) == 1
    assert "compiling" in told[0]
