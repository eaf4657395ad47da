"""Ratio metrics, time over tokens, of every arm: estimates and their covariance from first and second moments alone.

The unit of analysis is a cluster: all that one assignment unit brought, be it a request, a user or a time slot. A
cluster is a vector of sums (`FIELDS`); the moments are its sum and the sum of its outer product over clusters. Ratios
get their variance by the delta method over clusters, so requests of one user, or of one slot, need not be independent.

Adjustment removes what covariates explain that were fixed before the arm acted: the tokens of prompt and output
(an arm changes speed, never output), the load at arrival, and load times output. Every arm gets its own
regression line, and its mean is read off at the covariates' mean over all arms [Lin, arXiv 1208.2301]: the slopes come
from the same second moments, so nothing else has to be kept. Because all arms are read at the same mix of requests,
tokens cancel from the comparison.

Small arms. The delta method takes slopes and variances for known, which a small arm's are not. Two corrections, of no
weight where arms are large and of one size:

- An arm's level is read off at the mean covariates of all arms, d away from its own mean, and its slopes have errors of
  their own. With m clusters, covariates' mean square deviation S and residual variance σ², the level's variance is that
  of a prediction, σ²/m · (1 + d'S⁻¹d), of which the delta method has the 1 alone. d'S⁻¹d is the leverage of the
  point of prediction, as in HC2 and HC3 [MacKinnon and White 1985]; σ² is taken with m less the parameters fitted.
- Times are skewed. A small arm that happens to miss the rare slow requests looks faster and more certain at once, and
  no factor to its own residuals mends that. Arms that differ in speed alone have the same residual variance relative to
  their level, and the larger arms know it better. A small arm takes the greater of its own and the shared one, as
  the greater of the robust and the pooled error is advised for small samples [Angrist and Pischke 2009, section 8.1],
  in the measure in which it is smaller than the largest arm: not at all where it is as large.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

FIELDS = ("count", "time", "size", "prompt", "output", "load", "load_output")
"""A request's vector: 1, the metric's numerator and denominator, then the covariates."""
COUNT, TIME, SIZE = 0, 1, 2
COVARIATES = (3, 4, 5, 6)
"""All of them: fit for use where a request's own arm cannot have acted on the load it met."""
LENGTHS = (3, 4)
"""Prompt and output alone. Where an arm holds a whole time slot, the load at arrival is its own doing."""

ROUNDING = 1e-7
"""Least standard error of a logarithm: below it lies what rounding leaves where all requests take the same time."""


class Moments(NamedTuple):
    """Sums over clusters. Leading dimensions, if any, are separate looks or runs.

    sums: (..., arms, fields); second: (..., arms, fields, arms, fields), outer products within one cluster, across
    arms too: a block of time slots, or a bucket of users, holds several arms.
    """

    sums: Floats
    second: Floats


class Levels(NamedTuple):
    """The logarithm of every arm's ratio.

    log_ratio: (..., arms); covariance: (..., arms, arms); freedom: (..., arms), the effective number of clusters
    less the parameters fitted in each arm.
    """

    log_ratio: Floats
    covariance: Floats
    freedom: Floats


class _Fit(NamedTuple):
    """The regression of each arm, as far as its error goes. residual_variance, leverage: (..., arms)."""

    residual_variance: Floats
    """Variance of the mean residual, relative to the level squared."""
    leverage: Floats
    """Share of that variance which the error of the slopes adds to it."""
    num_fitted: int
    """Parameters fitted in each arm."""


def unadjusted(moments: Moments) -> Levels:
    """Sum of time over sum of tokens, as they came."""
    means, covariance = _means(moments)
    num_arms = means.shape[-2]
    gradient = np.zeros((*means.shape[:-1], *means.shape[-2:]))
    arms = np.arange(num_arms)
    gradient[..., arms, arms, TIME] = 1.0 / means[..., TIME]
    gradient[..., arms, arms, SIZE] = -1.0 / means[..., SIZE]
    own = gradient[..., arms, arms, :]
    fit = _Fit(_residual_variance(own, covariance), np.zeros(means.shape[:-1]), 1)
    return _levels(np.log(means[..., TIME] / means[..., SIZE]), gradient, covariance, _clusters(moments), fit)


def adjusted(moments: Moments, covariates: tuple[int, ...] = COVARIATES, *, is_paired: bool = False) -> Levels:
    """Time per token of every arm at the mix of requests of all arms together.

    `is_paired`: each cluster holds all arms, as a block of time slots does. What arms have in common then cancels, and
    one slope for all is fitted to how they differ within a cluster.
    """
    means, covariance = _means(moments)
    num_arms = means.shape[-2]
    chosen = list(covariates)
    arms = np.arange(num_arms)
    own = _within_clusters(covariance) if is_paired else np.einsum("...kfkg->...kfg", covariance)
    inverse = _inverse(own[..., chosen, :][..., chosen])
    slopes = np.einsum("...cd,...d->...c", inverse, own[..., chosen, TIME])
    share = moments.sums[..., COUNT] / moments.sums[..., COUNT].sum(-1, keepdims=True)
    pooled = np.einsum("...k,...kf->...f", share, means)
    shift = means[..., chosen] - pooled[..., None, chosen]
    level = means[..., TIME] - np.einsum("...kc,...kc->...k", slopes, shift)
    per_level = slopes / level[..., None]
    gradient = np.zeros((*means.shape[:-1], *means.shape[-2:]))
    gradient[..., arms, arms, TIME] = 1.0 / level
    for arm in range(num_arms):
        gradient[..., arm, arm, chosen] -= per_level[..., arm, :]
    residual = _residual_variance(gradient[..., arms, arms, :], covariance)
    gradient[..., chosen] += share[..., None, :, None] * per_level[..., :, None, :]
    log_ratio = np.log(level / pooled[..., None, SIZE])
    clusters = _clusters(moments)
    # Within blocks every arm is seen as often and at nearly the same covariates: nothing is extrapolated.
    reach = np.zeros_like(level) if is_paired else np.einsum("...kc,...kcd,...kd->...k", shift, inverse, shift)
    return _levels(log_ratio, gradient, covariance, clusters, _Fit(residual, reach / clusters, 1 + len(chosen)))


def difference(levels: Levels, arm: int, control: int) -> tuple[Floats, Floats, Floats]:
    """Log of the ratio of two arms' ratios, its standard error and its degrees of freedom, each (...)."""
    estimate = levels.log_ratio[..., arm] - levels.log_ratio[..., control]
    covariance = levels.covariance
    variance = covariance[..., arm, arm] + covariance[..., control, control] - 2.0 * covariance[..., arm, control]
    freedom = np.minimum(levels.freedom[..., arm], levels.freedom[..., control])
    return estimate, np.sqrt(np.maximum(variance, ROUNDING**2)), freedom


def _means(moments: Moments) -> tuple[Floats, Floats]:
    """Means per request, (..., arms, fields), and the covariance of all of them, (..., arms, fields, arms, fields)."""
    counts = moments.sums[..., COUNT]
    means = moments.sums / counts[..., None]
    second = moments.second
    # Each cluster centred at its own count: u - mean · count.
    second = second - means[..., :, :, None, None] * second[..., :, COUNT : COUNT + 1, :, :]
    second = second - means[..., None, None, :, :] * second[..., :, :, :, COUNT : COUNT + 1]
    return means, second / (counts[..., :, None, None, None] * counts[..., None, None, :, None])


def _within_clusters(covariance: Floats) -> Floats:
    """How arms deviate from their mean within a cluster, the same for every arm: (..., arms, fields, fields)."""
    num_arms = covariance.shape[-2]
    contrast = np.eye(num_arms) - 1.0 / num_arms
    pooled = np.einsum("kl,...kflg->...fg", contrast, covariance)
    return np.repeat(pooled[..., None, :, :], num_arms, axis=-3)


def _inverse(covariance: Floats) -> Floats:
    """Pseudo-inverse of covariances, (..., covariates, covariates); 0 for a covariate that does not vary."""
    deviation = np.sqrt(np.maximum(np.einsum("...cc->...c", covariance), 0.0))
    deviation = np.where(deviation > 0.0, deviation, np.inf)
    scale = deviation[..., :, None] * deviation[..., None, :]
    # The pseudo-inverse shares one effect among covariates that say the same thing.
    inverse: Floats = np.linalg.pinv(covariance / scale, rcond=1e-6, hermitian=True) / scale
    return inverse


def _clusters(moments: Moments) -> Floats:
    """Effective number of clusters of each arm, (..., arms): few where a few hold most of the tokens."""
    of_size = np.einsum("...kk->...k", moments.second[..., SIZE, :, SIZE])
    clusters: Floats = np.square(moments.sums[..., SIZE]) / of_size
    return clusters


def _residual_variance(own: Floats, covariance: Floats) -> Floats:
    """Variance of each arm's mean residual, relative to its level squared: (..., arms).

    own: (..., arms, fields), the gradient of each arm's level by its own means.
    """
    variance: Floats = np.einsum("...kf,...kfkg,...kg->...k", own, covariance, own)
    return variance


def _levels(log_ratio: Floats, gradient: Floats, covariance: Floats, clusters: Floats, fit: _Fit) -> Levels:
    """gradient: (..., arms, arms, fields), of each arm's level by every arm's means."""
    *batch, num_arms, _, _ = gradient.shape
    flat = gradient.reshape(*batch, num_arms, -1)
    spread = flat @ covariance.reshape(*batch, flat.shape[-1], flat.shape[-1]) @ np.swapaxes(flat, -1, -2)
    # Residuals are smaller than errors by what the fit took for itself.
    freedom = clusters - fit.num_fitted
    inflation = np.sqrt(clusters / np.maximum(freedom, 1.0))
    spread *= inflation[..., :, None] * inflation[..., None, :]
    # The variance of one cluster's residual, relative to the level squared.
    variance = fit.residual_variance * np.square(inflation) * clusters
    shared = (clusters * variance).sum(-1, keepdims=True) / clusters.sum(-1, keepdims=True)
    smallness = 1.0 - clusters / clusters.max(-1, keepdims=True)
    cautious = variance + smallness * np.maximum(shared - variance, 0.0)
    arms = np.arange(num_arms)
    spread[..., arms, arms] += (cautious * (1.0 + fit.leverage) - variance) / clusters
    return Levels(log_ratio, spread, freedom)
