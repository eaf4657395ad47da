"""Weights that come with forerun, each made by `forerun train`; `training.json` beside them says how."""

from __future__ import annotations

from pathlib import Path

EMBEDDED_EAGLE3 = "eagle3-smollm2-135m-instruct"


def shipped_eagle3(model: str) -> Path | None:
    """The EAGLE-3 head for a model as the settings name it; None if there is none for it."""
    folder = Path(__file__).parent / EMBEDDED_EAGLE3
    return folder if model == "embedded" and folder.is_dir() else None
