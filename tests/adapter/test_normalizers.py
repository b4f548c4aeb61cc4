"""Weights: the paper's figure, the published failures, and the law that any split gives the same sum."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from harnessrl.adapter.normalizers import MODES, token_weights

FIGURE_5 = ([50, 100, 30, 30, 30, 40], [0, 0, 1, 1, 1, 2])


def close(left, right):
    return np.shape(left) == np.shape(right) and np.allclose(left, right, rtol=1e-14, atol=0)


def reference(lengths, rollouts, mode, num_rollouts=None, scale=None):
    """Exact fractions, one sample after the other."""
    trained = [(length, rollout) for length, rollout in zip(lengths, rollouts, strict=True) if length]
    count = num_rollouts or len({rollout for _, rollout in trained})
    out = []
    for length, rollout in zip(lengths, rollouts, strict=True):
        of_rollout = sum(other for other, name in trained if name == rollout)
        divisor = {
            "token_mean": sum(other for other, _ in trained),
            "seq_mean": len(trained) * length,
            "rollout_mean": count * of_rollout,
            "constant": count * (scale or 0),
        }[mode]
        out.append(float(Fraction(1, divisor)) if length else 0.0)
    return out


@pytest.mark.parametrize(
    ("mode", "shares"),
    [
        ("token_mean", [150 / 280, 90 / 280, 40 / 280]),
        ("seq_mean", [2 / 6, 3 / 6, 1 / 6]),
        ("rollout_mean", [1 / 3, 1 / 3, 1 / 3]),
    ],
)
def test_figure_5(mode, shares):
    lengths, rollouts = FIGURE_5
    assert close(np.bincount(rollouts, weights=token_weights(lengths, rollouts, mode) * lengths), shares)


def test_rollout_mean_is_the_default():
    assert (token_weights(*FIGURE_5) == token_weights(*FIGURE_5, "rollout_mean")).all()


def test_constant_is_dr_grpo():
    assert close(token_weights([50, 100, 30], [0, 0, 1], "constant", scale=1024), [1 / 2048] * 3)
    assert close(token_weights([50, 100, 30], [0, 0, 1], "constant", scale=1024, num_rollouts=8), [1 / 8192] * 3)


# B32: a rollout that broke into N samples weighs N times


def loss(token_losses, rollouts, mode):
    weights = token_weights([len(losses) for losses in token_losses], rollouts, mode)
    return sum(weight * loss for weight, losses in zip(weights, token_losses, strict=True) for loss in losses)


def test_b32_by_its_values():
    batch = ([[2, 2], [0], [1, 1, 1]], [0, 1, 1])
    assert loss(*batch, "token_mean") == pytest.approx(7 / 6, abs=1e-15)
    assert loss(*batch, "seq_mean") == pytest.approx(1.0, abs=1e-15)
    assert loss(*batch, "rollout_mean") == pytest.approx(1.375, abs=1e-15)


@pytest.mark.parametrize("split", [[[0, 1, 1, 1]], [[0, 1], [1, 1]], [[0], [1], [1], [1]], [[], [0, 1, 1, 1], []]])
def test_how_a_rollout_is_split_changes_seq_mean_only(split):
    batch = ([[2, 2], *split], [0] + [1] * len(split))
    assert loss(*batch, "token_mean") == pytest.approx(7 / 6, abs=1e-15)
    assert loss(*batch, "rollout_mean") == pytest.approx(1.375, abs=1e-15)
    assert loss(*batch, "seq_mean") == pytest.approx(
        (2 + sum(sum(piece) / len(piece) for piece in split if piece)) / (1 + sum(bool(piece) for piece in split)),
        abs=1e-15,
    )


def test_the_denominator_is_rollouts_and_not_rows():
    weights = token_weights([2, 1, 3], [0, 1, 1])
    assert close(weights, [1 / 4, 1 / 8, 1 / 8])
    assert loss([[2, 2], [0], [1, 1, 1]], [0, 1, 1], "rollout_mean") != pytest.approx(0.9166667, abs=1e-3)


def test_a_rollout_without_trained_tokens_is_not_counted():
    assert close(token_weights([10, 0, 40], [0, 1, 2]), [0.05, 0.0, 0.0125])
    assert close(token_weights([10, 0, 40], [0, 1, 2], num_rollouts=3), [1 / 30, 0.0, 1 / 120])


def test_weight_of_skipped_calls_moves_to_the_tokens_that_remain():
    """The rollout keeps its share: 30 of 40 tokens skipped leave 10 that carry all of it."""
    for lengths in ([30, 10], [0, 10]):
        weights = token_weights([20, *lengths], [0, 1, 1])
        assert (weights[1:] * lengths).sum() == pytest.approx(0.5, abs=1e-15)


# B29: the result must not depend on accumulation steps


def test_b29_by_its_values():
    micro = [np.array([4.0]), np.array([1.0, 1.0, 1.0])]
    weights = token_weights([1, 3], [0, 1], "token_mean")
    total = sum(weight * losses.sum() for weight, losses in zip(weights, micro, strict=True))
    assert total == pytest.approx(1.75, abs=1e-15)


@pytest.mark.parametrize("mode", MODES)
def test_any_split_into_micro_batches_gives_the_same_loss(mode):
    """Weights come once from global counts; recomputed inside a micro-batch they give another loss."""
    rng = np.random.default_rng(3)
    lengths, rollouts = rng.integers(0, 30, 40), rng.integers(0, 9, 40)
    losses = [rng.normal(size=length) for length in lengths]
    weights = token_weights(lengths, rollouts, mode, scale=64)
    whole = sum(weight * loss.sum() for weight, loss in zip(weights, losses, strict=True))
    for size in (1, 2, 7, 40):
        order = rng.permutation(40)
        parts = [order[at : at + size] for at in range(0, 40, size)]
        accumulated = sum(sum(weights[index] * losses[index].sum() for index in part) for part in parts)
        assert accumulated == pytest.approx(whole, abs=1e-13)
        local = [token_weights(lengths[part], rollouts[part], mode, scale=64) for part in parts]
        wrong = np.mean(
            [sum(w * losses[i].sum() for w, i in zip(x, p, strict=True)) for x, p in zip(local, parts, strict=True)]
        )
        assert size == 40 or abs(wrong - whole) > 1e-3


@pytest.mark.parametrize("mode", MODES)
def test_exact_fractions_agree(mode):
    rng = np.random.default_rng(4)
    for _ in range(20):
        size = int(rng.integers(1, 30))
        lengths, rollouts = rng.integers(0, 5, size), rng.integers(0, 6, size) * 10**9
        for num_rollouts in (None, 50):
            found = token_weights(lengths, rollouts, mode, num_rollouts=num_rollouts, scale=7)
            assert close(found, reference(lengths.tolist(), rollouts.tolist(), mode, num_rollouts, 7))


@pytest.mark.parametrize("mode", ["token_mean", "seq_mean", "rollout_mean"])
def test_trained_tokens_weigh_one_in_all(mode):
    lengths, rollouts = [3, 0, 5, 1, 0], [0, 0, 1, 2, 3]
    assert (token_weights(lengths, rollouts, mode) * lengths).sum() == pytest.approx(1.0, abs=1e-15)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_to_train(mode):
    assert token_weights([], [], mode, scale=1).tolist() == []
    assert token_weights([0, 0], [0, 1], mode, scale=1, num_rollouts=0).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        (([1], [0], "mean"), {}, "mode 'mean' is unknown; allowed: token_mean, seq_mean, rollout_mean, constant"),
        (([1, 2], [0]), {}, "lengths has length 2, rollout_index has length 1"),
        (([1, -2], [0, 0]), {}, r"lengths\[1\] is -2"),
        (([1], [-1]), {}, r"rollout_index\[0\] is -1"),
        (([1.5], [0]), {}, "lengths must be a vector of integers"),
        (([1], ["a"]), {}, "rollout_index must be a vector of integers"),
        (([1], [0], "constant"), {}, "takes scale"),
        (([1], [0], "constant"), {"scale": 0}, "scale must be finite and positive"),
        (([1], [0]), {"num_rollouts": 0}, "num_rollouts must be positive"),
    ],
)
def test_bad_input_is_named(arguments, keywords, message):
    with pytest.raises(ValueError, match=message):
        token_weights(*arguments, **keywords)
