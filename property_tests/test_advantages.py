"""rollout_advantages equals a loop over the definition, and the two units agree where the theory says so."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harnessrl.adapter import assign_credit, merge_calls, rollout_advantages, token_weights
from property_tests import reference
from property_tests.strategies import NO_FLAWS, batches, scores

ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline")


@given(scores(), st.sampled_from(ESTIMATORS), st.sampled_from([0.0, 1e-6, 0.5]))
def test_advantages_equal_the_slow_reference(batch, estimator, eps):
    found = rollout_advantages(batch.rewards, batch.groups, estimator, eps=eps)
    slow = reference.advantages(batch.rewards, batch.groups, estimator, eps)
    assert found.dtype == np.float64
    # Deviations of rewards near 1000 are known to about 1e-12; a tiny spread turns that into a relative error.
    assert found == pytest.approx(slow, rel=1e-6, abs=1e-9)


@given(scores(), st.sampled_from(ESTIMATORS))
def test_unscored_rollouts_have_no_say(batch, estimator):
    found = rollout_advantages(batch.rewards, batch.groups, estimator)
    scored = [i for i, reward in enumerate(batch.rewards) if not math.isnan(reward)]
    alone = rollout_advantages([batch.rewards[i] for i in scored], [batch.groups[i] for i in scored], estimator)
    assert found[scored].tolist() == alone.tolist()
    assert not np.delete(found, scored).any()


@given(scores(), st.sampled_from(ESTIMATORS[:3]))
def test_equal_rewards_and_lonely_rollouts_teach_nothing(batch, estimator):
    found = rollout_advantages(batch.rewards, batch.groups, estimator)
    for group in set(batch.groups):
        members = [i for i, other in enumerate(batch.groups) if other == group]
        if len({batch.rewards[i] for i in members if not math.isnan(batch.rewards[i])}) <= 1:
            assert not found[members].any()


@given(scores(), st.sampled_from(ESTIMATORS), st.lists(st.integers(1, 5), min_size=8, max_size=8))
def test_how_rollouts_split_into_samples_changes_no_advantage(batch, estimator, counts):
    counts = counts[: len(batch.rewards)]
    alone = rollout_advantages(batch.rewards, batch.groups, estimator).tolist()
    assert rollout_advantages(batch.rewards, batch.groups, estimator, samples_per_rollout=counts).tolist() == alone
    one = {"unit": "sample", "samples_per_rollout": [1] * len(counts)}
    assert rollout_advantages(batch.rewards, batch.groups, estimator, **one).tolist() == alone


@given(scores(), st.sampled_from(ESTIMATORS), st.lists(st.integers(1, 4), min_size=8, max_size=8))
def test_the_sample_unit_is_the_rollout_unit_on_repeated_rollouts(batch, estimator, counts):
    counts = counts[: len(batch.rewards)]
    found = rollout_advantages(batch.rewards, batch.groups, estimator, unit="sample", samples_per_rollout=counts)
    owners = np.repeat(np.arange(len(counts)), counts)
    rewards, groups = np.array(batch.rewards)[owners], np.array(batch.groups)[owners]
    repeated = rollout_advantages(rewards, groups, estimator)
    assert found[owners] == pytest.approx(repeated, rel=1e-6, abs=1e-9)


@given(scores(), st.sampled_from(ESTIMATORS), batches(flaws=NO_FLAWS))
def test_the_two_units_agree(batch, estimator, rollouts):
    """Sum over trained tokens of weight x advantage = 0, in an update that holds whole groups."""
    advantages = rollout_advantages(batch.rewards, batch.groups, estimator, eps=1e-3)
    scored = [not math.isnan(reward) for reward in batch.rewards]
    shapes = [[int(s.loss_mask.sum()) for s in merge_calls(rollout).samples] for rollout in rollouts]
    owners, lengths = [], []
    for i in range(len(scored)):
        for length in shapes[i % len(shapes)]:
            owners.append(i)
            lengths.append(length * scored[i])  # unscored rollouts are passed with length 0
    weights = token_weights(lengths, owners, "rollout_mean")
    total = sum(w * n * advantages[i] for w, n, i in zip(weights, lengths, owners, strict=True))
    assert total == pytest.approx(0.0, abs=1e-9 * (1 + np.abs(advantages).max()))


@given(st.floats(-3, 3), st.lists(st.tuples(st.floats(-1, 1), st.integers(1, 50)), min_size=1, max_size=6))
def test_mean_preserving_credit_keeps_the_token_mean(advantage, calls):
    rewards, tokens = map(list, zip(*calls, strict=True))
    credit = assign_credit(advantage, rewards, "mean_preserving", call_tokens=tokens)
    assert np.average(credit, weights=tokens) == pytest.approx(advantage, abs=1e-9)
    assert np.diff(credit) == pytest.approx(np.diff(rewards), abs=1e-9)
    assert assign_credit(advantage, rewards, "identical").tolist() == [advantage] * len(rewards)
