"""What goes wrong with a model on disk."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint that is missing, truncated, or not what its config says; the message names file, field and cure."""
