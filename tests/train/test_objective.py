"""The losses by hand, against a slow float64 reference, and under any split."""

import math

import numpy as np
import pytest
import torch

from harnessrl.adapter import token_weights
from harnessrl.train.objective import (
    importance_weights,
    kl_values,
    policy_loss,
    sequence_mean,
    sequence_sum,
    weighted_sum,
)

CLIP = {"clip_low": 0.2, "clip_high": 0.3}


def columns(seed, n=40):
    rng = np.random.default_rng(seed)
    new = torch.tensor(-rng.exponential(1, n), requires_grad=True)
    old = torch.tensor(-rng.exponential(1, n))
    return new, old, torch.tensor(rng.normal(size=n)), torch.tensor(rng.dirichlet(np.ones(n)))


def slow_policy_loss(new, old, advantages, weights, clip_low, clip_high):
    total = 0.0
    for n, o, a, w in zip(new, old, advantages, weights, strict=True):
        ratio = math.exp(n - o)
        clipped = min(max(ratio, 1 - clip_low), 1 + clip_high)
        total -= w * min(ratio * a, clipped * a)
    return total


def test_literals():
    # ratios 1.5, 1.5, 0.5, 0.5 with advantages +1, -1, +1, -1: min picks 1.3, -1.5, 0.5, -0.8; sum -0.5, weights 1/4
    new = torch.log(torch.tensor([1.5, 1.5, 0.5, 0.5]))
    loss, metrics = policy_loss(new, torch.zeros(4), torch.tensor([1.0, -1, 1, -1]), torch.full((4,), 0.25), **CLIP)
    assert loss == pytest.approx(0.125, abs=1e-6)
    assert metrics["ratio_sum"] == pytest.approx(4.0, abs=1e-6)
    assert metrics["clipped"] == 2
    assert metrics["weight_advantage_sum"] == 0


def test_equals_the_slow_reference():
    for seed in range(5):
        new, old, advantages, weights = columns(seed)
        loss, _ = policy_loss(new, old, advantages, weights, **CLIP)
        expected = slow_policy_loss(new.tolist(), old.tolist(), advantages.tolist(), weights.tolist(), **CLIP)
        assert loss.item() == pytest.approx(expected, rel=1e-12)


def test_on_policy_gradient_is_weight_times_advantage():
    new, _, advantages, weights = columns(3)
    loss, _ = policy_loss(new, new.detach(), advantages, weights, **CLIP)
    loss.backward()
    assert torch.allclose(new.grad, -weights * advantages)


def test_any_split_adds_up():
    # B29: token losses [4] and [1, 1, 1] in two micro-batches are 7/4, not (4 + 1)/2 and not 7/8.
    weights = torch.tensor(token_weights([1, 3], [0, 1], "token_mean")).repeat_interleave(torch.tensor([1, 3]))
    minus = torch.tensor([-4.0, -1, -1, -1], dtype=torch.float64)
    zeros = torch.zeros(4, dtype=torch.float64)
    whole, _ = policy_loss(zeros, zeros, minus, weights, **CLIP)
    assert whole.item() == pytest.approx(1.75)
    for cuts in ([1], [2], [1, 2, 3], []):
        parts = zip(zeros.tensor_split(cuts), minus.tensor_split(cuts), weights.tensor_split(cuts), strict=True)
        assert sum(policy_loss(z, z, a, w, **CLIP)[0] for z, a, w in parts).item() == pytest.approx(1.75)


def test_no_tokens_give_zero_and_a_finite_gradient():
    new = torch.zeros(0, requires_grad=True)
    loss, _ = policy_loss(new, new.detach(), torch.zeros(0), torch.zeros(0), **CLIP)
    loss.backward()
    assert loss.item() == 0 and new.grad.shape == (0,)


def test_a_huge_log_ratio_without_advantage_gives_zero():
    new = torch.tensor([0.0, -1.0], requires_grad=True)
    loss, _ = policy_loss(
        new, torch.tensor([-1000.0, -1.0]), torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.5]), **CLIP
    )
    loss.backward()
    assert loss.item() == pytest.approx(-0.5)
    assert new.grad.tolist() == pytest.approx([0.0, -0.5])


def test_kl_literals():
    # d = log 2: k1 = 0.693147, k2 = 0.240227, k3 = 1/2 - 1 + 0.693147 = 0.193147
    new, reference = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    got = {k: kl_values(new, reference, k).item() for k in ("k1", "k2", "k3")}
    assert got == pytest.approx({"k1": 0.693147, "k2": 0.240227, "k3": 0.193147}, abs=1e-5)


def test_kl_estimators_have_the_right_mean():
    p, q = torch.tensor([0.7, 0.2, 0.1]).double(), torch.tensor([0.5, 0.25, 0.25]).double()
    exact = (p * (p / q).log()).sum()
    for estimator in ("k1", "k3"):  # both are unbiased: the expectation over p is exact
        assert torch.allclose(weighted_sum(kl_values(p.log(), q.log(), estimator), p), exact)
    with pytest.raises(ValueError, match="k1, k2 or k3"):
        kl_values(p.log(), q.log(), "k4")


def test_sequences_are_summed_by_their_id_wherever_they_lie():
    values, sequence = torch.tensor([1.0, 2, 4, 8, 16]), torch.tensor([7, 3, 7, 3, 9])
    assert sequence_sum(values, sequence).tolist() == [5, 10, 5, 10, 16]
    assert sequence_mean(values, sequence).tolist() == [2.5, 5, 2.5, 5, 16]
    assert sequence_sum(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).tolist() == []


def test_gspo_literal():
    # One sequence, log ratios log 4 and log 1: geometric mean 2, clipped to 1.3 for both tokens; A = 1, weights 1/2.
    new = torch.log(torch.tensor([4.0, 1.0]))
    sequence = torch.zeros(2, dtype=torch.int64)
    ones, half = torch.ones(2), torch.full((2,), 0.5)
    loss, metrics = policy_loss(new, torch.zeros(2), ones, half, **CLIP, kind="gspo", sequence=sequence)
    assert loss == pytest.approx(-1.3) and metrics["ratio_sum"] == pytest.approx(4.0) and metrics["clipped"] == 2
    with pytest.raises(ValueError, match="needs sequence"):
        policy_loss(new, torch.zeros(2), ones, half, **CLIP, kind="gspo")


def test_gspo_of_single_token_sequences_is_clip():
    new, old, advantages, weights = columns(1)
    alone = torch.arange(len(new))
    a, _ = policy_loss(new, old, advantages, weights, **CLIP, kind="gspo", sequence=alone)
    b, _ = policy_loss(new, old, advantages, weights, **CLIP)
    assert a.item() == pytest.approx(b.item(), rel=1e-12)


def test_gspo_equals_the_slow_reference():
    new, old, advantages, weights = columns(2)
    sequence = torch.arange(len(new)) // 5
    expected = 0.0
    for s in sequence.unique():
        tokens = sequence == s
        ratio = math.exp((new.detach()[tokens] - old[tokens]).mean())
        clipped = min(max(ratio, 0.8), 1.3)
        expected -= sum(
            w * min(ratio * a, clipped * a) for w, a in zip(weights[tokens], advantages[tokens], strict=True)
        )
    loss, _ = policy_loss(new, old, advantages, weights, **CLIP, kind="gspo", sequence=sequence)
    assert loss.item() == pytest.approx(float(expected), rel=1e-12)


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    # ratio 2 is clipped to 1.3: the gradient is -w * 1.3 * A, where "clip" has none.
    new = torch.log(torch.tensor([2.0, 1.0])).requires_grad_()
    half = torch.full((2,), 0.5)
    loss, _ = policy_loss(new, torch.zeros(2), torch.ones(2), half, **CLIP, kind="cispo")
    loss.backward()
    assert new.grad.tolist() == pytest.approx([-0.65, -0.5])
    again = new.detach().requires_grad_()
    policy_loss(again, torch.zeros(2), torch.ones(2), half, **CLIP)[0].backward()
    assert again.grad.tolist() == pytest.approx([0.0, -0.5])


def test_dual_clip_bounds_negative_advantages():
    # ratio 10, A = -1: unbounded -10; dual clip 3 bounds it at -3. Positive advantages are untouched.
    new = torch.log(torch.tensor([10.0, 10.0]))
    loss, metrics = policy_loss(
        new, torch.zeros(2), torch.tensor([-1.0, 1.0]), torch.tensor([1.0, 0.0]), **CLIP, dual_clip=3.0
    )
    assert loss == pytest.approx(3.0) and metrics["clipped"] == 2
    with pytest.raises(ValueError, match="dual_clip"):
        policy_loss(new, new, new, new, **CLIP, dual_clip=1.0)


def test_importance_literals():
    # trainer / engine ratios 4, 1/2, 1 on tokens; 2 on the sequence (4 * 1/2 * 1)
    old, engine = torch.log(torch.tensor([0.4, 0.1, 0.3])), torch.log(torch.tensor([0.1, 0.2, 0.3]))
    one = torch.zeros(3, dtype=torch.int64)
    token, metrics = importance_weights(old, engine, level="token")
    assert token.tolist() == pytest.approx([2.0, 0.5, 1.0]) and metrics["truncated"] == 1
    sequence, _ = importance_weights(old, engine, level="sequence", threshold=10, sequence=one)
    assert sequence.tolist() == pytest.approx([2.0] * 3)
    masked, metrics = importance_weights(old, engine, level="token", mask_below=0.6, mask_above=3.0)
    assert masked.tolist() == pytest.approx([0.0, 0.0, 1.0]) and metrics["masked"] == 2 and metrics["truncated"] == 0
    off, _ = importance_weights(old, engine, level="none")
    assert off.tolist() == [1, 1, 1]
    far, _ = importance_weights(torch.tensor([0.0]), torch.tensor([-2000.0]), level="token")
    assert far.tolist() == [2.0]
    for bad in ({"level": "word"}, {"level": "sequence"}):
        with pytest.raises(ValueError, match="level"):
            importance_weights(old, engine, **bad)


def test_temperature_mismatch_is_visible_in_the_ratio():
    # B17: logits [2, 0], token 0, T = 0.5. Same side: 1. Raw engine logprobs: 1.1149. Logprob / T: 1.2658.
    new = torch.tensor([-0.0181499])
    for engine, ratio in ((-0.0181499, 1.0), (-0.1269280, 1.1149), (-0.2538560, 1.2658)):
        _, metrics = policy_loss(new, torch.tensor([engine]), torch.ones(1), torch.ones(1), **CLIP)
        assert metrics["ratio_sum"] == pytest.approx(ratio, abs=1e-4)
