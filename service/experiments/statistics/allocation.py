"""How much traffic each arm gets next, by Thompson sampling [Thompson 1933], with a floor for every arm.

Weights follow what has been seen, so plain averages would be biased. Each request is therefore counted with the inverse
of the share its arm had when it was assigned: all arms then estimate the same mix of requests, and the floor bounds
what one request can weigh.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy import special

Floats = npt.NDArray[np.float64]


def best_probabilities(estimates: Floats, standard_errors: Floats) -> Floats:
    """Probability that each arm's level is the lowest, for independent normal levels. All (arms,).

    Integrated on a grid rather than drawn, so that it is a function of the data alone.
    """
    errors = np.maximum(standard_errors, 1e-12)
    grid = np.linspace(-6.0, 6.0, 601)
    points = estimates[:, None] + errors[:, None] * grid
    density = np.exp(-0.5 * np.square(grid))
    # (arm, point, other): how likely the other lies above the arm's point.
    above = special.ndtr((estimates[None, None, :] - points[:, :, None]) / errors[None, None, :])
    arms = np.arange(len(estimates))
    above[arms, :, arms] = 1.0
    mass = (density * above.prod(2)).sum(1)
    return np.asarray(mass / mass.sum())


def thompson_weights(estimates: Floats, standard_errors: Floats, *, floor: float) -> list[float]:
    """Each arm's share of traffic: the probability that its level is the lowest, and never below `floor`."""
    probabilities = best_probabilities(estimates, standard_errors)
    spread = 1.0 - floor * len(estimates)
    return [float(floor + spread * probability) for probability in probabilities]
