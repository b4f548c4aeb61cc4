"""Statistics of few seeds, by numbers that can be checked by hand."""

import numpy as np
import pytest

from harnessrl.statistics import (
    bootstrap_interval,
    interquartile_mean,
    interval,
    mean_iqm,
    paired_differences,
    probability_of_improvement,
    sign_flip_p,
)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0], 3.0),
        ([1.0, 2.0], 1.5),
        ([0.0, 1.0, 2.0, 9.0], 1.5),  # 0 and 9 go
        ([9.0, 1.0, 2.0, 3.0, -50.0], 2.0),
        ([0, 0, 1, 2, 3, 4, 5, 6, 100, 100], 3.5),  # two go on either side
    ],
)
def test_interquartile_mean_leaves_out_a_quarter_on_either_side(values, expected):
    assert interquartile_mean(np.array(values, float)) == pytest.approx(expected)


def test_a_value_that_is_missing_is_not_taken_for_the_highest():
    values = np.array([[0.1, 1.0], [0.2, 1.0], [0.3, 1.0], [np.nan, 1.0]])
    assert np.isnan(interquartile_mean(values)).tolist() == [True, False]
    assert np.isnan(probability_of_improvement(values[:, 0], values[:, 1]))
    assert np.isnan(interval(np.append(values[:, 0], 0.4))).all()


def test_interquartile_mean_of_columns_is_that_of_each_column():
    values = np.random.default_rng(0).normal(size=(11, 3))
    assert np.allclose(interquartile_mean(values), [interquartile_mean(column) for column in values.T])


def test_probability_of_improvement_counts_ties_by_half():
    assert probability_of_improvement(np.array([1.0, 2.0]), np.array([1.0, 3.0])) == (0.5 + 0 + 1 + 0) / 4
    assert probability_of_improvement(np.array([1.0, 2.0]), np.array([1.0, 2.0])) == 0.5


def test_paired_differences_use_common_seeds_in_order():
    assert paired_differences({3: 0.5, 1: 0.9, 7: 1.0}, {1: 0.4, 3: 0.6, 5: 0.0}).tolist() == pytest.approx([0.5, -0.1])


@pytest.mark.parametrize(
    ("differences", "p"),
    [
        ([1.0, 2.0, 3.0], 2 / 8),  # only +++ and ---
        ([1.0, 2.0, -3.0], 1.0),  # the mean is 0
        ([3.0, 3.0, -1.0], 4 / 8),  # sums: +-7, +-5 (the observed)
        ([0.1] * 5, 2 / 32),
        ([0.0, 0.0], 1.0),
        ([np.nan, 1.0], np.nan),
    ],
)
def test_the_sign_flip_test_is_exact(differences, p):
    assert sign_flip_p(np.array(differences)) == pytest.approx(p, nan_ok=True)


def test_the_sign_flip_test_holds_its_level():
    # of independent draws around 0 the share with p <= .05 is at most .05, and for ten seeds hardly less
    rng = np.random.default_rng(2)
    found = np.array([sign_flip_p(rng.normal(size=10)) for _ in range(1000)])
    assert 0.03 < (found <= 0.05).mean() < 0.07
    with pytest.raises(ValueError, match="1 to 20 differences, got 21"):
        sign_flip_p(np.ones(21))


@pytest.mark.parametrize(("seeds", "share"), [(5, 0.90), (10, 0.935)])
def test_the_interval_covers_the_truth_nearly_as_often_as_it_says(seeds, share):
    # The percentile bootstrap is known to be short for few seeds; the shares are those of 4000 trials.
    rng = np.random.default_rng(1)
    hits = 0
    for trial in range(400):
        low, high = bootstrap_interval([rng.normal(5, 1, seeds)], draws=400, seed=trial)
        hits += low <= 5 <= high
    assert abs(hits / 400 - share) < 0.035


def test_strata_are_resampled_apart():
    # Two tasks of different level: pooling their seeds would spread the mean over both levels.
    mean = lambda strata: np.concatenate(strata).mean(axis=0)  # noqa: E731
    low, high = bootstrap_interval([np.array([0.0, 0.1] * 5), np.array([1.0, 1.1] * 5)], mean, draws=2000)
    assert high - low < 0.06
    pooled_low, pooled_high = bootstrap_interval([np.array([0.0, 0.1] * 5 + [1.0, 1.1] * 5)], mean, draws=2000)
    assert pooled_high - pooled_low > 0.4


def test_the_statistic_sees_every_stratum():
    strata = [np.full(4, 2.0), np.full(4, 4.0)]
    assert mean_iqm(strata) == 3.0
    assert bootstrap_interval(strata) == (3.0, 3.0)
    assert mean_iqm([*strata[:1], np.full(40, 4.0)]) == 3.0  # a task with more seeds counts no more


def test_few_seeds_show_their_range():
    low, high = interval(np.array([[1.0, 5.0], [3.0, 4.0]]))
    assert low.tolist() == [1.0, 4.0] and high.tolist() == [3.0, 5.0]
    values = np.array([0.1, 0.2, 0.3, 0.4, 0.9])
    low, high = interval(values)
    assert 0.1 < low < interquartile_mean(values) < high < 0.9
