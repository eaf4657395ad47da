"""Speculation configs: plain data, the same type in the settings file, a request, a profile and an experiment's arm."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import Annotated, Literal, NamedTuple

import msgspec

MAX_SPECULATIVE_TOKENS = 32
"""Deepest a draft may reach."""
MAX_TREE_SIZE = 63
"""Most nodes of a draft tree; equals `target.batch.MAX_TREE_SIZE`, which this torch-free file cannot import."""

NumTokens = Annotated[int, msgspec.Meta(ge=1, le=32)] | Literal["auto"]
"""How many tokens deep to draft at most; "auto" leaves it to the draft-length controller."""
NumNodes = Annotated[int, msgspec.Meta(ge=1, le=63)] | Literal["auto"]
"""Most nodes of a tree; "auto" is a chain where `num_speculative_tokens` is given, else left to the controller."""


class NoSpeculation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="method", tag="none"):
    """Plain decoding: one token a step."""


class NgramConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="method", tag="ngram"
):
    """Prompt lookup: what followed the last occurrence of the newest n tokens in prompt and output, longest n first."""

    num_speculative_tokens: NumTokens = "auto"
    min_n: Annotated[int, msgspec.Meta(ge=1, le=16)] = 1
    max_n: Annotated[int, msgspec.Meta(ge=1, le=16)] = 3

    def __post_init__(self) -> None:
        """Raises ValueError for an empty range of n."""
        if self.min_n > self.max_n:
            raise ValueError(f"min_n is {self.min_n}, above max_n, {self.max_n}; it must not be larger")


class SuffixConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="method", tag="suffix"
):
    """Suffix matching over the sequence and over finished responses: the longer the match, the longer the draft."""

    num_speculative_tokens: NumTokens = "auto"
    tree_size: NumNodes = "auto"
    length_factor: Annotated[float, msgspec.Meta(gt=0.0, le=32.0)] | Literal["auto"] = "auto"
    """A match of m tokens is continued by at most `length_factor` * m tokens; "auto" is 2 where the size is given, else
    8: the controller, which cuts where it does not pay, knows better."""
    min_confidence: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.1
    """A node is drafted if the path to it was taken in at least this share of the occurrences."""


class PredictionConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="method", tag="prediction"
):
    """The request's predicted output, followed from its start and found again after a miss."""

    num_speculative_tokens: NumTokens = "auto"


class DraftModelConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="method", tag="draft_model"
):
    """A small model with the target's tokenizer, given to the service at start."""

    num_speculative_tokens: NumTokens = "auto"
    tree_size: NumNodes = "auto"


class MedusaConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="method", tag="medusa"
):
    """Heads over the target's last hidden state, one a position, given to the service at start."""

    num_speculative_tokens: NumTokens = "auto"
    tree_size: NumNodes = "auto"


class Eagle3Config(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="method", tag="eagle3"
):
    """A one-layer head over features of three target layers, given to the service at start."""

    num_speculative_tokens: NumTokens = "auto"
    tree_size: NumNodes = "auto"


SingleConfig = NgramConfig | SuffixConfig | PredictionConfig | DraftModelConfig | MedusaConfig | Eagle3Config
"""Configs of one proposer."""


class FirstConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="method", tag="first"
):
    """Several proposers in order: the first that has something drafts."""

    proposers: Annotated[tuple[SingleConfig, ...], msgspec.Meta(min_length=1, max_length=6)]

    def __post_init__(self) -> None:
        """Raises ValueError if a method is named twice: the second would never have anything else to say."""
        methods = [method_of(config) for config in self.proposers]
        if len(set(methods)) < len(methods):
            raise ValueError(f"proposers names a method twice: {', '.join(methods)}; each may stand there once")


class AutoConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="method", tag="auto"):
    """The best combination of what the service has for its model; `resolve` says which."""


SpeculationConfig = (
    NoSpeculation
    | NgramConfig
    | SuffixConfig
    | PredictionConfig
    | DraftModelConfig
    | MedusaConfig
    | Eagle3Config
    | FirstConfig
    | AutoConfig
)

MODEL_FREE_METHODS = ("prediction", "suffix", "ngram")
"""Methods every service has."""
MODEL_METHODS = ("eagle3", "medusa", "draft_model")
"""Methods a service has if it was given the weights, best first."""


class DraftBounds(NamedTuple):
    """How large a draft a config allows."""

    num_nodes: int
    depth: int
    is_fixed: bool
    """The user chose the size: it is drafted as it stands. Otherwise the controller chooses up to it."""
    is_chain: bool


def method_of(config: SpeculationConfig) -> str:
    """The config's method, as users write it."""
    return str(type(config).__struct_config__.tag)


def single_configs(config: SpeculationConfig) -> tuple[SingleConfig, ...]:
    """The proposers a resolved config names, in order; () for plain decoding. Raises ValueError for "auto"."""
    if isinstance(config, AutoConfig):
        raise ValueError("method 'auto' must be resolved against the service's methods before it is used")
    if isinstance(config, NoSpeculation):
        return ()
    return config.proposers if isinstance(config, FirstConfig) else (config,)


def config_of(config: SpeculationConfig, method: str) -> SingleConfig:
    """The config of one of the methods that a resolved config names. Raises ValueError for another."""
    for single in single_configs(config):
        if method_of(single) == method:
            return single
    raise ValueError(f"method {method!r} is not named by {config!r}")


@lru_cache(maxsize=256)
def bounds_of(config: SingleConfig) -> DraftBounds:
    """The size a config allows its proposer's drafts.

    | num_speculative_tokens | tree_size | drafts                                   |
    | k                      | "auto"    | chains of k, fixed                       |
    | k                      | n         | trees of n nodes, k deep, fixed          |
    | "auto"                 | n         | up to n nodes, as the controller decides |
    | "auto"                 | "auto"    | as the controller decides                |
    """
    depth = config.num_speculative_tokens
    if isinstance(config, NgramConfig | PredictionConfig):
        num_nodes = MAX_SPECULATIVE_TOKENS if depth == "auto" else depth
        return DraftBounds(num_nodes, num_nodes, depth != "auto", is_chain=True)
    size = config.tree_size
    if depth == "auto":
        return DraftBounds(
            MAX_TREE_SIZE if size == "auto" else size, MAX_SPECULATIVE_TOKENS, is_fixed=False, is_chain=False
        )
    return DraftBounds(depth if size == "auto" else size, depth, is_fixed=True, is_chain=size == "auto")


def resolve(config: SpeculationConfig, methods: AbstractSet[str], *, has_prediction: bool = False) -> SpeculationConfig:
    """The config with "auto" replaced by a combination of `methods`, and the client's predicted output consulted first.

    Raises ValueError for a method that is not among `methods`.
    """
    if isinstance(config, AutoConfig):
        names = [name for name in ("suffix", *MODEL_METHODS) if name in methods]
        lookup_and_head = tuple(msgspec.convert({"method": name}, type=SingleConfig) for name in names[:2])
        config = FirstConfig(proposers=lookup_and_head) if lookup_and_head else NoSpeculation()
    singles = single_configs(config)
    for single in singles:
        if method_of(single) not in methods:
            raise ValueError(f"method {method_of(single)!r} is not served here; one of {', '.join(sorted(methods))}")
    if has_prediction and singles and not any(isinstance(single, PredictionConfig) for single in singles):
        return FirstConfig(proposers=(PredictionConfig(), *singles))
    return config
