from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from service.experiments.statistics import ratio

Floats = npt.NDArray[np.float64]


def requests(rng: np.random.Generator, num: int, slowdown: float = 1.0) -> Floats:
    """Rows as `ratio.FIELDS`."""
    prompt, output = np.ceil(rng.lognormal(5.0, 0.8, num)), np.ceil(rng.lognormal(4.0, 0.8, num)) + 1.0
    load = rng.poisson(5.0, num).astype(float)
    seconds = slowdown * output * (0.02 + 0.004 * load) * rng.lognormal(0.0, 0.2, num) + 0.002 * prompt
    return np.stack([np.ones(num), seconds, output, prompt, output, load, load * output], axis=1)


def moments(*clusters: Floats) -> ratio.Moments:
    """clusters: (clusters, arms, fields)."""
    stacked = np.concatenate(clusters)
    return ratio.Moments(stacked.sum(0), np.einsum("cif,cjg->ifjg", stacked, stacked))


def alone(rows: Floats, arm: int, num_arms: int = 2) -> Floats:
    """Every row a cluster of its own, in one arm."""
    clusters = np.zeros((len(rows), num_arms, rows.shape[1]))
    clusters[:, arm] = rows
    return clusters


def test_the_ratio_s_error_is_the_delta_method_s() -> None:
    """Log ratio and standard error equal the textbook formulas on the rows themselves."""
    rng = np.random.default_rng(1)
    one, two = requests(rng, 400), requests(rng, 600, 0.8)
    estimate, error, _ = ratio.difference(ratio.unadjusted(moments(alone(one, 0), alone(two, 1))), 1, 0)
    expected, variance = [], 0.0
    for rows in (one, two):
        seconds, tokens = rows[:, ratio.TIME], rows[:, ratio.SIZE]
        level = seconds.sum() / tokens.sum()
        expected.append(np.log(level))
        variance += np.sum((seconds - level * tokens) ** 2) / seconds.sum() ** 2
    assert float(estimate) == pytest.approx(expected[1] - expected[0])
    assert float(error) == pytest.approx(np.sqrt(variance), rel=0.01)


def test_adjustment_is_a_regression_in_each_arm() -> None:
    """The adjusted estimate equals fitting each arm by least squares and predicting at the pooled covariates."""
    rng = np.random.default_rng(2)
    arms = [requests(rng, 300), requests(rng, 500, 0.7)]
    covariates = list(ratio.COVARIATES)
    pooled = np.concatenate(arms)[:, covariates].mean(0)
    means = []
    for rows in arms:
        design = np.column_stack([np.ones(len(rows)), rows[:, covariates] - pooled])
        means.append(np.linalg.lstsq(design, rows[:, ratio.TIME], rcond=None)[0][0])
    levels = ratio.adjusted(moments(alone(arms[0], 0), alone(arms[1], 1)))
    assert float(ratio.difference(levels, 1, 0)[0]) == pytest.approx(np.log(means[1] / means[0]), rel=1e-6)


def test_standard_errors_are_true() -> None:
    """Over 400 repetitions both estimates scatter as their standard errors say, and the adjusted one scatters less."""
    rng = np.random.default_rng(3)
    found = []
    for _ in range(400):
        sample = moments(alone(requests(rng, 200), 0), alone(requests(rng, 200), 1))
        found.append(
            [ratio.difference(levels, 1, 0)[:2] for levels in (ratio.unadjusted(sample), ratio.adjusted(sample))]
        )
    plain, fitted = np.moveaxis(np.array(found), 1, 0)
    for estimates in (plain, fitted):
        assert np.std(estimates[:, 0]) == pytest.approx(np.sqrt(np.mean(estimates[:, 1] ** 2)), rel=0.12)
    assert np.std(fitted[:, 0]) < 0.8 * np.std(plain[:, 0])


def test_requests_of_one_unit_count_as_one() -> None:
    """A request that is repeated ten times within its cluster leaves estimate, error and freedom as they were."""
    rng = np.random.default_rng(4)
    once = [alone(requests(rng, 150), 0), alone(requests(rng, 150), 1)]
    tenfold = [10.0 * clusters for clusters in once]
    for estimate in (ratio.unadjusted, ratio.adjusted):
        single, repeated = (ratio.difference(estimate(moments(*clusters)), 1, 0) for clusters in (once, tenfold))
        assert np.allclose(single, repeated)


def test_merging_clusters_into_buckets_keeps_the_error() -> None:
    """Summing whole clusters into 64 buckets changes the standard error by the noise of 64 buckets and no more."""
    rng = np.random.default_rng(5)
    clusters = np.concatenate([alone(requests(rng, 2000), 0), alone(requests(rng, 2000), 1)])
    buckets = np.zeros((64, 2, clusters.shape[2]))
    np.add.at(buckets, rng.integers(0, 64, len(clusters)), clusters)
    exact = ratio.difference(ratio.unadjusted(moments(clusters)), 1, 0)
    bucketed = ratio.difference(ratio.unadjusted(moments(buckets)), 1, 0)
    assert float(bucketed[0]) == pytest.approx(float(exact[0]))
    assert float(bucketed[1]) == pytest.approx(float(exact[1]), rel=0.25)
    assert bucketed[2] < 64 < exact[2]


def test_what_a_block_s_arms_share_cancels() -> None:
    """A tide that slows both slots of a block alike costs the difference nothing, though each arm swings with it."""
    rng = np.random.default_rng(6)
    blocks = np.zeros((200, 2, len(ratio.FIELDS)))
    for block in blocks:
        tide = rng.lognormal(0.0, 0.5)
        for arm in (0, 1):
            block[arm] = requests(rng, 20, tide).sum(0)
    own = ratio.unadjusted(moments(blocks))
    error = float(ratio.difference(own, 1, 0)[1])
    assert error < 0.4 * np.sqrt(own.covariance[0, 0] + own.covariance[1, 1])


def test_a_covariate_that_never_varies_is_no_trouble() -> None:
    """For a metric per request the denominator is constant, and all load may be 0: the rest still adjusts."""
    rng = np.random.default_rng(7)
    rows = [requests(rng, 200), requests(rng, 200)]
    for arm in rows:
        arm[:, ratio.SIZE] = 1.0
        arm[:, 5:] = 0.0
    estimate, error, freedom = ratio.difference(ratio.adjusted(moments(alone(rows[0], 0), alone(rows[1], 1))), 1, 0)
    assert np.isfinite([estimate, error, freedom]).all()


def test_one_dominant_unit_leaves_few_degrees_of_freedom() -> None:
    """A thousand units of which one has half of all tokens count as about four."""
    rows = np.ones((1000, len(ratio.FIELDS)))
    rows[0] *= 1000.0
    levels = ratio.unadjusted(moments(alone(rows, 0), alone(rows, 1)))
    assert 2.0 < levels.freedom[0] < 4.0


def test_a_prediction_s_error_has_its_leverage() -> None:
    """With normal errors the adjusted standard error equals the textbook one of a regression's prediction."""
    rng = np.random.default_rng(8)
    arms = []
    for mean in (10.0, 11.0):
        rows = np.ones((40, len(ratio.FIELDS)))
        rows[:, ratio.COVARIATES] = rng.normal(mean, 1.0, (40, 4))
        rows[:, ratio.TIME] = 10.0 + rows[:, ratio.COVARIATES].sum(1) + rng.normal(0.0, 1.0, 40)
        arms.append(rows)
    pooled = np.concatenate(arms)[:, ratio.COVARIATES].mean(0)
    expected = 0.0
    for rows in arms:
        design = np.column_stack([np.ones(40), rows[:, ratio.COVARIATES] - pooled])
        coefficients, residual, _, _ = np.linalg.lstsq(design, rows[:, ratio.TIME], rcond=None)
        prediction = np.linalg.inv(design.T @ design)[0, 0] * residual[0] / (40 - 5)
        expected += prediction / coefficients[0] ** 2
    _, error, _ = ratio.difference(ratio.adjusted(moments(alone(arms[0], 0), alone(arms[1], 1))), 1, 0)
    assert float(error) == pytest.approx(np.sqrt(expected), rel=0.05)


def test_a_small_arm_is_no_more_certain_than_the_others() -> None:
    """Fifty steady requests beside 950 that vary get the larger arm's variance, and the larger arm keeps its own."""
    rng = np.random.default_rng(9)
    large, small = requests(rng, 950), requests(rng, 50)
    small[:, ratio.TIME] = 0.05 * small[:, ratio.SIZE] * rng.lognormal(0.0, 0.01, 50)
    both = ratio.unadjusted(moments(alone(large, 0), alone(small, 1))).covariance
    effective = [np.square(rows[:, ratio.SIZE].sum()) / np.square(rows[:, ratio.SIZE]).sum() for rows in (large, small)]
    assert both[1, 1] * effective[1] == pytest.approx(both[0, 0] * effective[0], rel=0.15)
    twins = ratio.unadjusted(moments(alone(large, 0), alone(large, 1))).covariance
    assert both[0, 0] == pytest.approx(twins[0, 0], rel=0.01)


def test_arms_of_one_size_keep_their_own_variance() -> None:
    """An arm of steady times stays as certain as it is beside one that varies, if both have as many requests."""
    rng = np.random.default_rng(10)
    varied, steady = requests(rng, 500), requests(rng, 500)
    steady[:, ratio.SIZE] = varied[:, ratio.SIZE]
    steady[:, ratio.TIME] = 0.05 * steady[:, ratio.SIZE] * rng.lognormal(0.0, 0.01, 500)
    covariance = ratio.unadjusted(moments(alone(varied, 0), alone(steady, 1))).covariance
    assert covariance[1, 1] < 0.01 * covariance[0, 0]


def test_rounding_is_no_difference() -> None:
    """Where every request takes the same time, nothing that rounding leaves lies outside the interval."""
    rng = np.random.default_rng(11)
    rows = requests(rng, 500)
    rows[:, ratio.SIZE] = 6.0
    rows[:, ratio.TIME] = 0.3 + 0.1 / 3.0
    sample = moments(alone(rows[:470], 0), alone(rows[470:], 1))
    for levels in (ratio.unadjusted(sample), ratio.adjusted(sample)):
        estimate, error, _ = ratio.difference(levels, 1, 0)
        assert abs(float(estimate)) < float(error) < 1e-6
