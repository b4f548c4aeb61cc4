"""The losses by hand, against a slow float64 reference, and under any split."""

import math

import numpy as np
import pytest
import torch

from harnessrl.adapter import token_weights
from harnessrl.train.objective import kl_loss, policy_loss

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
    new, reference, weight = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)]), torch.ones(1)
    got = {k: kl_loss(new, reference, weight, estimator=k).item() for k in ("k1", "k2", "k3")}
    assert got == pytest.approx({"k1": 0.693147, "k2": 0.240227, "k3": 0.193147}, abs=1e-5)


def test_kl_estimators_have_the_right_mean():
    p, q = torch.tensor([0.7, 0.2, 0.1]).double(), torch.tensor([0.5, 0.25, 0.25]).double()
    exact = (p * (p / q).log()).sum()
    for estimator in ("k1", "k3"):  # both are unbiased: the expectation over p is exact
        assert torch.allclose(kl_loss(p.log(), q.log(), p, estimator=estimator), exact)
    with pytest.raises(ValueError, match="k1, k2 or k3"):
        kl_loss(p.log(), q.log(), p, estimator="k4")
