"""Heads in the settings: served when they fit, warned of when they hardly do, refused by name when they cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog

from speculation.assembly import assemble
from speculation.settings import EngineSettings
from tests.tiny_folder import write_tiny_folder
from tests.tiny_medusa import write_tiny_medusa


def settings_for(target: Path, **heads: object) -> EngineSettings:
    return EngineSettings(
        model=str(target),
        dtype="float32",
        backend="torch",
        num_blocks=40,
        max_model_len=128,
        **heads,  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("target"))


def test_heads_that_are_given_are_served(target: Path, tmp_path: Path) -> None:
    """Medusa heads become a method; random ones are warned of; a model without heads of its own has none."""
    with structlog.testing.capture_logs() as logs:
        engine, ready = assemble(settings_for(target, medusa=str(write_tiny_medusa(tmp_path))))
    assert "medusa" in ready.methods
    assert "eagle3" not in ready.methods
    assert [entry for entry in logs if "first guesses are right" in entry["event"]]
    assert engine.pool.num_in_use == 0


@pytest.mark.parametrize(
    ("method", "message"),
    [("eagle3", "eagle3: .* holds a medusa; give it as medusa"), ("medusa", r"medusa: .*the tensor 4.0.linear.weight")],
)
def test_what_cannot_be_loaded_names_the_setting(target: Path, tmp_path: Path, method: str, message: str) -> None:
    """A folder of another kind, or one without its tensors, stops the start with the setting's name."""
    folder = write_tiny_medusa(tmp_path, **({} if method == "eagle3" else {"medusa_num_heads": 5}))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        assemble(settings_for(target, **{method: str(folder)}))
    with pytest.raises(ValueError, match=f"{method}: .*does not exist"):
        assemble(settings_for(target, **{method: str(tmp_path / "nowhere")}))
