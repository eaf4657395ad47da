"""A fixed-size sample of the distinct units seen: the smallest hashes [Bar-Yossef et al. 2002], with their arms.

A unit's hash is independent of its arm, so the sample shows how units fell to arms, however many requests each made.
The sample of a union is the union of samples, cut again: merging is associative, commutative and idempotent.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

MAX_UNITS = 4096
"""Up to here the sample is a census."""
HASH_BITS = 52
"""Hashes are exact in a double, which is what Redis sorts by."""

Sample = dict[int, int]
"""Arm by hash, a number below 2**HASH_BITS."""


def add_unit(sample: Sample, unit: int, arm: int) -> None:
    """Counts a unit once; now and then cuts the sample, in place."""
    sample[unit] = arm
    if len(sample) >= 2 * MAX_UNITS:
        kept = cut(sample)
        sample.clear()
        sample.update(kept)


def cut(sample: Mapping[int, int]) -> Sample:
    """The MAX_UNITS smallest."""
    return {unit: sample[unit] for unit in heapq.nsmallest(MAX_UNITS, sample)}


def merged(one: Mapping[int, int], other: Mapping[int, int]) -> Sample:
    return cut({**one, **other})


def num_units(sample: Mapping[int, int]) -> float:
    """Distinct units seen: exact up to MAX_UNITS, then within a few per cent from how densely the hashes lie."""
    if len(sample) < MAX_UNITS:
        return float(len(sample))
    return (MAX_UNITS - 1) * 2.0**HASH_BITS / max(cut(sample))


def units_by_arm(sample: Mapping[int, int], num_arms: int) -> list[int]:
    """How many units of the sample each arm has."""
    counts = [0] * num_arms
    for arm in cut(sample).values():
        counts[arm] += 1
    return counts
