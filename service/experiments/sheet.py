"""A tally as arrays: read once, used by everything that a report says."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from service.experiments.assignment import NUM_BUCKETS
from service.experiments.model import Definition, Metric
from service.experiments.statistics import ratio
from service.experiments.statistics.quantile import NUM_BINS, SampleSize
from service.experiments.tally import NUM_FIELDS, Tally, guarded_metrics, num_groups

Floats = npt.NDArray[np.float64]

MAX_COUNT = 2.0**53
"""Largest sum of ones that a float holds exactly. A sum that counts something and is larger, or below 0, is damaged."""
MOMENTS = frozenset({"s", "m", "b"})
"""Kinds of sums that are no counts: they may have any finite value."""


class Sheet:
    """What a tally holds of an experiment, in the shapes that statistics take. Arms as in the definition.

    Sums that cannot have come from adding requests, such as NaN, are read as 0 and named in `damaged`.
    """

    damaged: list[str]
    """Names of the sums that are no numbers, or counts that are impossible. Nothing is compared where there are any."""

    def __init__(self, tally: Tally, definition: Definition) -> None:
        self._tally = tally
        self.definition = definition
        num_arms, groups = len(definition.arms), num_groups(definition)
        arrays: dict[str, Floats] = {
            "s": np.zeros((num_arms, NUM_FIELDS)),
            "m": np.zeros((num_arms, NUM_FIELDS, NUM_FIELDS)),
            "b": np.zeros((NUM_BUCKETS if definition.is_clustered else 0, num_arms, NUM_FIELDS)),
            "e": np.zeros((num_arms, groups)),
            "t": np.zeros((num_arms, groups)),
            "x": np.zeros(num_arms),
            "v": np.zeros(num_arms),
        }
        arrays |= {f"q.{metric}": np.zeros((num_arms, groups, NUM_BINS)) for metric in guarded_metrics(definition)}
        self.damaged = []
        for name, amount in tally.sums.items():
            kind, *index = name.split(".")
            if not (math.isfinite(amount) if kind in MOMENTS else 0.0 <= amount <= MAX_COUNT):
                self.damaged.append(name)
                continue
            if kind == "q":
                kind = f"q.{index.pop(0)}"
            if kind in arrays:
                arrays[kind][tuple(map(int, index))] = amount
        self._arrays = arrays

    @property
    def units(self) -> dict[int, int]:
        """The arm of each sampled unit."""
        return self._tally.units

    @property
    def failed(self) -> Floats:
        """Failed requests, (arms, groups)."""
        return self._arrays["e"]

    @property
    def served(self) -> Floats:
        """Failed requests and finished ones, (arms, groups)."""
        return self._arrays["t"]

    @property
    def expected(self) -> Floats:
        """Requests that each arm was to get, (arms,)."""
        return self._arrays["x"]

    @property
    def variance(self) -> Floats:
        """Of the number of requests that each arm was to get, (arms,)."""
        return self._arrays["v"]

    def count(self, arm: int, what: str) -> int:
        return self._whole(f"n.{arm}.{what}")

    def seen(self, what: str) -> int:
        """Requests "considered", "matched" or "assigned"."""
        return self._whole(f"c.{what}")

    def _whole(self, name: str) -> int:
        return 0 if name in self.damaged else int(self._tally.sums.get(name, 0.0))

    def bins(self, metric: Metric) -> Floats:
        """(arms, groups, bins)."""
        return self._arrays[f"q.{metric}"]

    def size(self, arm: int) -> SampleSize:
        """Size of what is kept by group, at least as many units as groups that have something.

        Buckets hold the primary metric alone: a request with one token has a time to first token, and no bucket.
        """
        observations = self.count(arm, "finished") + self.count(arm, "failed")
        if not self.definition.is_clustered:
            return SampleSize(observations, observations)
        buckets = self._arrays["b"][:, arm, ratio.COUNT]
        return SampleSize(observations, int(max(np.count_nonzero(buckets), np.count_nonzero(self.served[arm]))))

    def moments(self) -> ratio.Moments:
        """Over clusters: requests, or buckets of units."""
        num_arms = len(self.definition.arms)
        if self.definition.is_clustered:
            clusters = self._arrays["b"]
            flat = clusters.reshape(NUM_BUCKETS, -1)
            return ratio.Moments(clusters.sum(0), (flat.T @ flat).reshape(num_arms, NUM_FIELDS, num_arms, NUM_FIELDS))
        upper = self._arrays["m"]
        second = np.zeros((num_arms, NUM_FIELDS, num_arms, NUM_FIELDS))
        arms = np.arange(num_arms)
        second[arms, :, arms, :] = upper + np.swapaxes(np.triu(upper, 1), 1, 2)
        return ratio.Moments(self._arrays["s"], second)
