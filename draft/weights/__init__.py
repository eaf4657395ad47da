"""Weights that come with forerun, each made by `forerun train`; `training.json` beside them says how."""

from __future__ import annotations

from pathlib import Path

EMBEDDED_EAGLE3 = "eagle3-smollm2-135m-instruct"
EMBEDDED_DRAFT_MODEL = "draft-smollm2-135m-instruct"


def shipped_eagle3(model: str) -> Path | None:
    """The EAGLE-3 head for a model as the settings name it; None if there is none for it."""
    return _shipped(EMBEDDED_EAGLE3, model)


def shipped_draft_model(model: str) -> Path | None:
    """The draft model for a model as the settings name it; None if there is none for it."""
    return _shipped(EMBEDDED_DRAFT_MODEL, model)


def _shipped(name: str, model: str) -> Path | None:
    folder = Path(__file__).parent / name
    return folder if model == "embedded" and folder.is_dir() else None
