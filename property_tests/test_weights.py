"""token_weights equals the definition, sums to one, and makes the loss independent of any split."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harnessrl.adapter import token_weights
from property_tests import reference

MODES = ("token_mean", "seq_mean", "rollout_mean", "constant")
SAMPLES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 4)), max_size=12)


@given(SAMPLES, st.sampled_from(MODES), st.one_of(st.none(), st.integers(1, 9)), st.floats(1, 4096))
def test_weights_equal_the_definition(samples, mode, num_rollouts, scale):
    lengths, rollouts = [n for n, _ in samples], [r for _, r in samples]
    found = token_weights(lengths, rollouts, mode, num_rollouts=num_rollouts, scale=scale)
    assert found.tolist() == pytest.approx(reference.token_weights(lengths, rollouts, mode, num_rollouts, scale))


@given(SAMPLES, st.sampled_from(MODES[:3]))
def test_the_weights_of_all_trained_tokens_sum_to_one(samples, mode):
    lengths, rollouts = [n for n, _ in samples], [r for _, r in samples]
    total = float(np.dot(token_weights(lengths, rollouts, mode), lengths))
    assert total == pytest.approx(1.0 if any(lengths) else 0.0)


@given(SAMPLES)
def test_rollout_mean_gives_every_rollout_one_share_however_it_is_split(samples):
    lengths, rollouts = [n for n, _ in samples], [r for _, r in samples]
    weights = token_weights(lengths, rollouts, "rollout_mean")
    shares = np.bincount(rollouts, weights=weights * lengths) if samples else np.zeros(0)
    trained = {r for n, r in samples if n}
    assert shares[sorted(trained)] == pytest.approx(np.full(len(trained), 1 / max(1, len(trained))))


FEW_TOKENS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=6)


@given(st.data(), FEW_TOKENS, st.sampled_from(MODES))
def test_the_loss_does_not_depend_on_order_or_micro_batches(data, samples, mode):
    """A normaliser is weights, not a reduction: partial sums of weight * loss add up, in any order."""
    lengths, rollouts = [n for n, _ in samples], [r for _, r in samples]
    losses = [data.draw(st.lists(st.floats(-5, 5), min_size=n, max_size=n)) for n in lengths]
    weights = token_weights(lengths, rollouts, mode, scale=100)
    whole = sum(w * sum(loss) for w, loss in zip(weights, losses, strict=True))
    order = data.draw(st.permutations(range(len(samples))))
    shuffled = token_weights([lengths[i] for i in order], [rollouts[i] for i in order], mode, scale=100)
    assert shuffled.tolist() == pytest.approx([weights[i] for i in order])
    parts = [w * sum(losses[i]) for i, w in zip(order, shuffled, strict=True)]
    cut = data.draw(st.integers(0, len(parts)))
    assert sum(parts[:cut]) + sum(parts[cut:]) == pytest.approx(whole, abs=1e-9)
