"""Speculation configs: plain data, the same type in the settings file, a request, a profile and an experiment's arm."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

NumTokens = Annotated[int, msgspec.Meta(ge=1, le=32)] | Literal["auto"]
"""How many tokens to draft at most; "auto" leaves it to the draft-length controller."""


class NoSpeculation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="method", tag="none"):
    """Plain decoding: one token a step."""


class NgramConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="method", tag="ngram"
):
    """Prompt lookup: what followed the last occurrence of the newest n tokens, in prompt and output, longest n first."""

    num_speculative_tokens: NumTokens = "auto"
    min_n: Annotated[int, msgspec.Meta(ge=1, le=16)] = 1
    max_n: Annotated[int, msgspec.Meta(ge=1, le=16)] = 3

    def __post_init__(self) -> None:
        """Raises ValueError for an empty range of n."""
        if self.min_n > self.max_n:
            raise ValueError(f"min_n is {self.min_n}, above max_n, {self.max_n}; it must not be larger")


class DraftModelConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="method", tag="draft_model"
):
    """A small model with the target's tokenizer, given to the service at start."""

    num_speculative_tokens: NumTokens = "auto"


SpeculationConfig = NoSpeculation | NgramConfig | DraftModelConfig


def method_of(config: SpeculationConfig) -> str:
    """The config's method, as users write it."""
    return str(type(config).__struct_config__.tag)
