"""Advantages and credit on numbers that can be checked by hand, and against a loop over groups."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from harnessrl.adapter.baselines import (
    ESTIMATORS,
    assign_credit,
    rollout_advantages,
    token_advantages,
    zero_signal_groups,
)
from harnessrl.adapter.normalizers import token_weights
from tests.adapter.making import make_sample

GROUP_ESTIMATORS = tuple(name for name in ESTIMATORS if name != "reinforce_pp")
NAN = math.nan


def close(left, right):
    return np.shape(left) == np.shape(right) and np.allclose(left, right, rtol=1e-12, atol=1e-12)


def reference(rewards, group_ids, estimator, eps):
    """One group after the other, in the words of the docstring, on exact sums."""
    scored = [index for index, reward in enumerate(rewards) if not math.isnan(reward)]
    out = [0.0] * len(rewards)
    centred = {}
    for index in scored:
        group = [rewards[other] for other in scored if group_ids[other] == group_ids[index]]
        others = [rewards[other] for other in scored if group_ids[other] == group_ids[index] and other != index]
        centred[index] = rewards[index] - statistics.fmean(group)
        if estimator == "dr_grpo":
            out[index] = centred[index]
        elif estimator == "rloo" and others:
            out[index] = rewards[index] - statistics.fmean(others)
        elif estimator == "grpo" and others:
            out[index] = centred[index] / (statistics.stdev(group) + eps)
    if estimator == "reinforce_pp":
        centred = {index: rewards[index] - statistics.fmean(rewards[other] for other in scored) for index in scored}
    if estimator.startswith("reinforce_pp"):
        for index in scored:
            out[index] = centred[index] / (statistics.pstdev(centred.values()) + eps)
    return out


# B24: groups of one


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_a_group_of_one_has_advantage_zero_and_counts_as_no_signal(estimator):
    assert rollout_advantages([0.7], ["a"], estimator).tolist() == [0.0]
    assert zero_signal_groups([0.7], ["a"]) == 1


def test_ragged_groups_rloo():
    assert rollout_advantages([1, 0, 0.7], ["a", "a", "b"], "rloo").tolist() == [1.0, -1.0, 0.0]
    assert zero_signal_groups([1, 0, 0.7], ["a", "a", "b"]) == 1


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("rewards", [[0.7], [0.7, NAN], [NAN, 0.7, NAN]])
def test_what_leaves_one_scored_rollout_is_a_group_of_one(estimator, eps, rewards):
    """The same rule however the singleton came about: sampled once, or its siblings lost."""
    batch = [*rewards, 1.0, 0.0]
    groups = ["a"] * len(rewards) + ["b", "b"]
    advantages = rollout_advantages(batch, groups, estimator, eps=eps)
    assert advantages[: len(rewards)].tolist() == [0.0] * len(rewards)
    assert advantages[-2] > 0 > advantages[-1]
    assert zero_signal_groups(batch, groups) == 1


def test_reinforce_pp_has_no_groups_and_is_not_zeroed_by_their_rule():
    advantages = rollout_advantages([1.0, 0.0, 0.5], ["a", "b", "c"], "reinforce_pp", eps=0.0)
    assert close(advantages, [math.sqrt(1.5), -math.sqrt(1.5), 0.0])
    assert rollout_advantages([1.0, 0.0, 0.5], ["a", "b", "c"], "reinforce_pp_baseline").tolist() == [0.0] * 3


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_the_loop_agrees_at_every_group_size(estimator, size):
    rng = np.random.default_rng(size)
    rewards = rng.choice([0.0, 0.1, 0.25, 1.0, NAN], size=6 * size)
    groups = rng.permutation(np.repeat(np.arange(6), size)).tolist()
    for eps in (1e-6, 0.5):
        assert close(
            rollout_advantages(rewards, groups, estimator, eps=eps), reference(rewards, groups, estimator, eps)
        )


# B26: a rollout is one observation, however many samples it became


def test_statistics_are_taken_over_rollouts():
    rewards, groups = [1.0, 0.0], ["g", "g"]
    assert rollout_advantages(rewards, groups, "dr_grpo").tolist() == [0.5, -0.5]
    assert close(rollout_advantages(rewards, groups, "grpo", eps=0.0), [0.7071067811865476, -0.7071067811865476])


def test_the_practice_argued_against_is_there_for_ablation():
    rewards, groups = [1.0, 0.0], ["g", "g"]
    found = rollout_advantages(rewards, groups, "dr_grpo", unit="sample", samples_per_rollout=[1, 3])
    assert found.tolist() == [0.75, -0.25]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_number_of_samples_matters_to_the_sample_unit_only(estimator):
    rewards, groups = [1.0, 0.0, 0.25, 1.0], ["g", "g", "h", "h"]
    plain = rollout_advantages(rewards, groups, estimator)
    for split in ([1, 3, 1, 1], [2, 1, 5, 1]):
        assert (rollout_advantages(rewards, groups, estimator, samples_per_rollout=split) == plain).all()
        by_sample = rollout_advantages(rewards, groups, estimator, unit="sample", samples_per_rollout=split)
        assert np.abs(by_sample - plain).max() > 0.01


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_sample_unit_is_the_rollout_unit_on_repeated_rewards(estimator):
    rewards, groups, counts = [1.0, 0.0, NAN, 0.3, 0.9, 0.9], [0, 0, 0, 1, 1, 1], [2, 3, 4, 1, 2, 0]
    found = rollout_advantages(rewards, groups, estimator, unit="sample", samples_per_rollout=counts)
    repeated = rollout_advantages(np.repeat(rewards, counts), np.repeat(groups, counts), estimator)
    assert close(np.repeat(found, counts), repeated)
    assert found[2] == found[5] == 0.0  # unscored; without samples


def test_figure_4():
    """Reward 1 in three samples, reward 0 in one: the baseline is 1/2 by rollout and 3/4 by sample."""
    assert rollout_advantages([1, 0], ["x", "x"], "dr_grpo").tolist() == [0.5, -0.5]
    found = rollout_advantages([1, 0], ["x", "x"], "dr_grpo", unit="sample", samples_per_rollout=[3, 1])
    assert found.tolist() == [0.25, -0.75]


# Numbers


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -0.7, 1e9 + 0.1])
def test_equal_rewards_give_exact_zeros(estimator, eps, reward):
    """Three times 0.1 has a mean that is not 0.1, which with eps=0 would become an advantage of 0.8."""
    assert np.mean([0.1] * 3) != 0.1
    for size in (3, 6, 7):
        assert (rollout_advantages([reward] * size, ["g"] * size, estimator, eps=eps) == 0.0).all()


def test_rewards_near_1000_keep_three_digits():
    found = rollout_advantages([1000.001, 1000.0, 1000.002], ["g"] * 3, "grpo", eps=0.0)
    assert found == pytest.approx([0.0, -1.0, 1.0], abs=5e-4)


@pytest.mark.parametrize("size", [1e200, 1.0, 1e-200, 1e300])
def test_the_size_of_rewards_does_not_matter(size):
    """The square of 1e200 is infinite and that of 1e-200 is 0; groups of both sizes may lie side by side."""
    rewards = [size, -size, 1.0, 0.0]
    root = math.sqrt(0.5)
    assert rollout_advantages(rewards, list("aabb"), "grpo", eps=0.0) == pytest.approx([root, -root, root, -root])
    found = rollout_advantages([size, -size, size, -size], list("aabb"), "reinforce_pp", eps=0.0)
    assert found == pytest.approx([1.0, -1.0, 1.0, -1.0])
    found = rollout_advantages([size, -size, size, -size], list("aabb"), "reinforce_pp_baseline", eps=0.0)
    assert found == pytest.approx([1.0, -1.0, 1.0, -1.0])
    assert rollout_advantages([size, -size], ["a", "a"], "rloo").tolist() == [2 * size, -2 * size]


def test_grpo_by_hand():
    # mean 0.25, deviations .75, -.25, -.25, -.25, squares .5625 + 3 * .0625 = .75, over 3: std 0.5
    assert close(rollout_advantages([1, 0, 0, 0], ["g"] * 4, "grpo", eps=0.0), [1.5, -0.5, -0.5, -0.5])
    assert close(rollout_advantages([1, 0, 0, 0], ["g"] * 4, "grpo", eps=0.5), [0.75, -0.25, -0.25, -0.25])
    assert close(rollout_advantages([1, 0, 0, 0], ["g"] * 4, "rloo"), [1.0, -1 / 3, -1 / 3, -1 / 3])


def test_reinforce_pp_by_hand():
    # batch mean 0.5, std 0.5; with the baseline: deviations +-.5 and 0, 0, so mean square .125
    rewards, groups = [1, 0, 0, 0, 1, 1], ["a", "a", "b", "b", "c", "c"]
    assert close(rollout_advantages(rewards, groups, "reinforce_pp", eps=0.0), [1, -1, -1, -1, 1, 1])
    assert close(
        rollout_advantages(rewards[:4], groups[:4], "reinforce_pp_baseline", eps=0.0),
        [math.sqrt(2), -math.sqrt(2), 0, 0],
    )


def test_unscored_rollouts_are_outside_every_statistic():
    for estimator in ESTIMATORS:
        found = rollout_advantages([1.0, NAN, 0.0, 0.5], ["a", "a", "a", "b"], estimator)
        without = rollout_advantages([1.0, 0.0, 0.5], ["a", "a", "b"], estimator)
        assert found.tolist() == [without[0], 0.0, without[1], without[2]]
    assert rollout_advantages([NAN, None], ["a", "a"]).tolist() == [0.0, 0.0]
    assert zero_signal_groups([NAN, None, 1, 0], list("aabb")) == 0


def test_a_failure_that_is_left_out_loses_the_negative_signal():
    """Why a rollout that failed on its own account is scored 0 and not NaN."""
    assert rollout_advantages([1.0, 0.0], ["a", "a"], "dr_grpo").tolist() == [0.5, -0.5]
    assert rollout_advantages([1.0, NAN], ["a", "a"], "dr_grpo").tolist() == [0.0, 0.0]


def test_group_ids_are_labels_of_any_kind():
    rewards = [1.0, 0.0, 0.2, 0.8]
    expected = rollout_advantages(rewards, ["a", "b", "b", "a"]).tolist()
    for labels in ([7, -3, -3, 7], np.array([7, 1, 1, 7]), [("x", 1), ("y", 1), ("y", 1), ("x", 1)]):
        assert rollout_advantages(rewards, labels).tolist() == expected


def test_no_rollouts():
    for estimator in ESTIMATORS:
        assert rollout_advantages([], [], estimator).tolist() == []
    assert zero_signal_groups([], []) == 0


def test_arguments_are_left_alone():
    rewards, groups = np.array([1.0, NAN, 0.0]), np.array([0, 0, 0])
    rollout_advantages(rewards, groups)
    assert np.array_equal(rewards, [1.0, NAN, 0.0], equal_nan=True) and groups.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        (([1.0], ["a"], "ppo"), {}, "estimator 'ppo' is unknown; allowed: grpo, dr_grpo, rloo"),
        (([1.0, 0.0], ["a"]), {}, "rewards has length 2, group_ids has length 1"),
        (([1.0, math.inf], ["a", "a"]), {}, r"rewards\[1\] is inf"),
        (([[1.0]], ["a"]), {}, r"rewards must be a vector of numbers, got shape \(1, 1\)"),
        (([1.0], ["a"]), {"unit": "token"}, "unit 'token' is unknown; allowed: rollout, sample"),
        (([1.0], ["a"]), {"unit": "sample"}, "takes samples_per_rollout"),
        (
            ([1.0], ["a"]),
            {"unit": "sample", "samples_per_rollout": [1, 2]},
            "length 1, samples_per_rollout has length 2",
        ),
        (
            ([1.0], ["a"]),
            {"unit": "sample", "samples_per_rollout": [-1]},
            r"samples_per_rollout\[0\] is -1; it cannot be negative",
        ),
        (
            ([1.0], ["a"]),
            {"unit": "sample", "samples_per_rollout": [1.5]},
            "samples_per_rollout must be a vector of integers",
        ),
        (([1.0], ["a"]), {"eps": -1e-6}, "eps must be finite and not negative"),
    ],
)
def test_bad_input_is_named(arguments, keywords, message):
    with pytest.raises(ValueError, match=message):
        rollout_advantages(*arguments, **keywords)


# The two units agree: sum over trained tokens of weight * advantage


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_weight_times_advantage_sums_to_zero_in_rollout_units(estimator):
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(8), 8)
    rewards = np.where(rng.random(64) < 0.1, NAN, rng.choice([0.0, 1.0], 64))
    samples = rng.integers(1, 6, 64)
    rollout_of_sample = np.repeat(np.arange(64), samples)
    lengths = np.where(np.isnan(rewards)[rollout_of_sample], 0, rng.integers(1, 500, len(rollout_of_sample)))

    def total(advantages, mode):
        return (token_weights(lengths, rollout_of_sample, mode) * lengths * advantages[rollout_of_sample]).sum()

    advantages = rollout_advantages(rewards, groups, estimator)
    assert abs(total(advantages, "rollout_mean")) < 1e-15
    assert abs(total(advantages, "token_mean")) > 1e-4
    by_sample = rollout_advantages(rewards, groups, estimator, unit="sample", samples_per_rollout=samples)
    assert abs(total(by_sample, "rollout_mean")) > 1e-4


# Credit inside a rollout


def test_identical_credit_is_the_default():
    assert assign_credit(0.5, [0.0, 3.0, 0.0]).tolist() == [0.5, 0.5, 0.5]


def test_discounted_credit_by_hand():
    # from the last call: 1 + 4 = 5; 0 + 5/2 = 2.5; 2 + 2.5/2 = 3.25
    assert assign_credit(1.0, [2.0, 0.0, 4.0], "discounted", gamma=0.5).tolist() == [3.25, 2.5, 5.0]
    assert assign_credit(1.0, [0.0, 0.0, 0.0], "discounted", gamma=0.5).tolist() == [0.25, 0.5, 1.0]
    assert assign_credit(1.0, [0.0, 0.0, 0.0], "discounted", gamma=0.0).tolist() == [0.0, 0.0, 1.0]


def test_identical_is_discounted_without_discount_or_call_rewards():
    calls = [0.0] * 5
    assert (assign_credit(0.3, calls, "discounted", gamma=1.0) == assign_credit(0.3, calls)).all()


def test_mean_preserving_credit_by_hand():
    # token-weighted mean of the call rewards: (1 * 3 + 0 * 1) / 4 = 0.75
    assert assign_credit(2.0, [1.0, 0.0], "mean_preserving", call_tokens=[3, 1]).tolist() == [2.25, 1.25]
    assert assign_credit(2.0, [1.0, 0.0], "mean_preserving").tolist() == [2.5, 1.5]
    assert assign_credit(2.0, [0.1] * 3, "mean_preserving", call_tokens=[3, 1, 7]).tolist() == [2.0] * 3
    assert assign_credit(2.0, [1.0, 5.0], "mean_preserving", call_tokens=[0, 4]).tolist() == [2.0, 2.0]
    assert assign_credit(2.0, [1.0, 5.0], "mean_preserving", call_tokens=[0, 0]).tolist() == [2.0, 2.0]


def test_mean_preserving_keeps_rollouts_equally_weighted():
    """Sum of weight * advantage stays 0 over a group whose credit was moved; discounting breaks it."""
    rng = np.random.default_rng(1)
    advantages = rollout_advantages([1.0, 0.0, 0.0, 1.0], ["g"] * 4, "dr_grpo")
    totals = dict.fromkeys(("identical", "mean_preserving", "discounted"), 0.0)
    for advantage in advantages:
        tokens, rewards = rng.integers(1, 50, 6), rng.normal(size=6)
        weight = 1 / (4 * tokens.sum())
        for scheme in totals:
            credit = assign_credit(advantage, rewards, scheme, call_tokens=tokens)
            assert scheme == "identical" or credit.std() > 0.1
            totals[scheme] += (weight * tokens * credit).sum()
    assert abs(totals["identical"]) < 1e-15 and abs(totals["mean_preserving"]) < 1e-15
    assert abs(totals["discounted"]) > 0.01


def test_credit_of_no_calls():
    for scheme in ("identical", "discounted", "mean_preserving"):
        assert assign_credit(1.0, [], scheme).tolist() == []


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        ((1.0, [0.0], "gae"), {}, "scheme 'gae' is unknown; allowed: identical, discounted, mean_preserving"),
        ((NAN, [0.0]), {}, "advantage must be finite"),
        ((1.0, [0.0, NAN]), {}, r"call_rewards\[1\] is nan"),
        ((1.0, [0.0]), {"call_tokens": [1, 2]}, "call_tokens has length 2, call_rewards has length 1"),
        ((1.0, [0.0]), {"call_tokens": [-1]}, r"call_tokens\[0\] is -1; it cannot be negative"),
        ((1.0, [0.0]), {"gamma": 1.5}, "gamma must lie in 0..1"),
    ],
)
def test_bad_credit_input_is_named(arguments, keywords, message):
    with pytest.raises(ValueError, match=message):
        assign_credit(*arguments, **keywords)


def test_credit_lands_on_the_tokens_of_its_call():
    sample = make_sample([1, 2, 3, 4, 5, 6], [(1, 3), (5, 6)])
    found = token_advantages(sample, {"0.1": 0.5, "0.5": -1.0, "elsewhere": 9.0})
    assert found.tolist() == [0.0, 0.5, 0.5, 0.0, 0.0, -1.0]
    with pytest.raises(ValueError, match=r"rollout 'r', call '0\.5': no credit"):
        token_advantages(sample, {"0.1": 0.5})
