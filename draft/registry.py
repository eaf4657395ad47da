"""Which proposers exist without anything being loaded."""

from __future__ import annotations

from draft.ngram import NgramProposer
from draft.prediction import PredictionProposer
from draft.proposer import Proposer
from draft.suffix import SuffixProposer

CORPUS_CAPACITY = 2**18
"""Tokens of finished responses that suffix decoding keeps: about 20 MB."""


def lookup_proposers(corpus_capacity: int = CORPUS_CAPACITY) -> dict[str, Proposer]:
    """A proposer for each method that needs no model, by method. `corpus_capacity` is a power of two, in tokens."""
    proposers: list[Proposer] = [PredictionProposer(), SuffixProposer(corpus_capacity), NgramProposer()]
    return {proposer.name: proposer for proposer in proposers}
