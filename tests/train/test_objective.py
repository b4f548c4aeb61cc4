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


def test_literals():
    # ratios 1.5, 1.5, 0.5, 0.5 with advantages +1, -1, +1, -1: min picks 1.3, -1.5, 0.5, -0.8; sum -0.5, weights 1/4
    new = torch.log(torch.tensor([1.5, 1.5, 0.5, 0.5]))
    loss, metrics = policy_loss(new, torch.zeros(4), torch.tensor([1.0, -1, 1, -1]), torch.full((4,), 0.25), **CLIP)
    assert loss == pytest.approx(0.125, abs=1e-6)
    assert metrics["ratio_sum"] == pytest.approx(4.0, abs=1e-6)
    assert metrics["clipped"] == 2
    assert metrics["weight_advantage_sum"] == 0


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
        for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
            new = torch.zeros(4, dtype=torch.float64, requires_grad=True)
            columns = (x[order].tensor_split(cuts) for x in (new, minus, weights))
            loss = sum(policy_loss(z, z.detach(), a, w, **CLIP)[0] for z, a, w in zip(*columns, strict=True))
            loss.backward()
            assert loss.item() == pytest.approx(1.75)
            assert new.grad.tolist() == pytest.approx([1.0, 0.25, 0.25, 0.25])


def test_no_tokens_give_zero_and_a_finite_gradient():
    new = torch.zeros(0, requires_grad=True)
    loss, _ = policy_loss(new, new.detach(), torch.zeros(0), torch.zeros(0), **CLIP)
    loss.backward()
    assert loss.item() == 0 and new.grad.shape == (0,)


@pytest.mark.parametrize("kind", ["clip", "gspo", "cispo"])
@pytest.mark.parametrize(
    ("advantage", "weight", "dual_clip", "expected"),
    [
        (0.0, 0.5, None, 0.0),
        (-1.0, 0.0, None, 0.0),  # masked
        (1.0, 0.5, None, -0.65),  # clipped at 1.3
        (-1.0, 0.5, 3.0, 1.5),  # dual clip
    ],
)
def test_an_overflowing_ratio_that_cannot_count_leaves_a_finite_gradient(kind, advantage, weight, dual_clip, expected):
    new = torch.tensor([0.0, -1.0], requires_grad=True)
    advantages, weights = torch.tensor([advantage, 1.0]), torch.tensor([weight, 0.5])
    options = CLIP | {"kind": kind, "dual_clip": dual_clip, "sequence": torch.arange(2)}
    loss, _ = policy_loss(new, torch.tensor([-1000.0, -1.0]), advantages, weights, **options)
    loss.backward()
    if kind == "cispo":  # its token loss is -w * stop(1.3) * A * logprob, and the first logprob is 0
        assert loss.item() == pytest.approx(0.5) and new.grad.tolist() == pytest.approx(
            [-weight * 1.3 * advantage, -0.5]
        )
    else:
        assert loss.item() == pytest.approx(expected - 0.5) and new.grad.tolist() == pytest.approx([0.0, -0.5])


def test_all_tokens_masked_give_zero_and_a_finite_gradient():
    """Engine and trainer differ by 1000 nats on every token: all weights are 0, also where the ratio is to the engine."""
    new = torch.tensor([0.0, -1000.0], requires_grad=True)
    engine, advantages = torch.tensor([-1000.0, 0.0]), torch.tensor([-1.0, -1.0])
    correction, metrics = importance_weights(new.detach(), engine, level="token", mask_below=0.5, mask_above=2.0)
    loss, _ = policy_loss(new, engine, advantages, torch.ones(2) * correction, **CLIP)
    loss.backward()
    assert metrics["masked"] == 2 and loss.item() == 0 and new.grad.tolist() == [0, 0]


def slow_token(new, ratio, advantage, kind, dual_clip):
    """One token's loss without its weight, and the loss's slope in logprob and in ratio (times ratio), in plain floats."""
    clipped = min(max(ratio, 0.8), 1.3)
    if kind == "cispo":
        return -clipped * advantage * new, -clipped * advantage, 0.0
    value, slope = -min(ratio * advantage, clipped * advantage), -ratio * advantage
    if clipped * advantage < ratio * advantage:
        slope = 0.0
    if dual_clip is not None and advantage < 0 and value > -dual_clip * advantage:
        value, slope = -dual_clip * advantage, 0.0
    return value, 0.0, slope


@pytest.mark.parametrize("kind", ["clip", "gspo", "cispo"])
@pytest.mark.parametrize("dual_clip", [None, 1.5])
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_equal_a_slow_reference_in_float64(kind, dual_clip, seed):
    new, old, advantages, weights = columns(seed)
    sequence = torch.tensor(np.random.default_rng(seed).integers(0, 9, len(new)))
    loss, _ = policy_loss(new, old, advantages, weights, **CLIP, kind=kind, dual_clip=dual_clip, sequence=sequence)
    loss.backward()
    expected, slopes = 0.0, [0.0] * len(new)
    values, gaps = new.tolist(), (new.detach() - old).tolist()
    for t, (a, w) in enumerate(zip(advantages.tolist(), weights.tolist(), strict=True)):
        mates = [u for u in range(len(new)) if kind == "gspo" and sequence[u] == sequence[t]] or [t]
        ratio = math.exp(sum(gaps[u] for u in mates) / len(mates))
        value, own, shared = slow_token(values[t], ratio, a, kind, dual_clip)
        expected += w * value
        slopes[t] += w * own
        for u in mates:
            slopes[u] += w * shared / len(mates)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert new.grad.tolist() == pytest.approx(slopes, rel=1e-10, abs=1e-15)


@pytest.mark.parametrize("level", ["none", "token", "sequence"])
def test_importance_weights_equal_a_slow_reference_in_float64(level):
    old, engine, _, _ = columns(4)
    sequence = torch.arange(len(old)) // 3
    masks = {"threshold": 1.5, "mask_below": 0.3, "mask_above": 4.0}
    found, metrics = importance_weights(old, engine, level=level, sequence=sequence, **masks)
    gaps, expected, masked, truncated = (old - engine).tolist(), [], 0, 0
    for t in range(len(gaps)):
        mates = [u for u in range(len(gaps)) if level == "sequence" and sequence[u] == sequence[t]] or [t]
        rho = math.exp(sum(gaps[u] for u in mates))
        inside = 0.3 <= rho <= 4.0
        masked, truncated = masked + (not inside), truncated + (inside and rho > 1.5 and level != "none")
        expected.append(float(inside) if level == "none" else inside * min(rho, 1.5))
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
    assert not found.requires_grad and (metrics["masked"], metrics["truncated"]) == (masked, truncated) and masked > 3
    assert metrics["importance_sum"].item() == pytest.approx(sum(expected))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_and_its_gradient_equal_a_slow_reference_in_float64(estimator):
    new, reference, _, weights = columns(6)
    weighted_sum(kl_values(new, reference, estimator), weights).backward()
    for n, r, w, slope, value in zip(
        new.tolist(),
        reference.tolist(),
        weights.tolist(),
        new.grad.tolist(),
        kl_values(new, reference, estimator).tolist(),
        strict=True,
    ):
        d = n - r
        wanted = {"k1": (d, 1.0), "k2": (d * d / 2, d), "k3": (math.exp(-d) - 1 + d, 1 - math.exp(-d))}[estimator]
        assert value == pytest.approx(wanted[0], rel=1e-12, abs=1e-15)
        assert slope == pytest.approx(w * wanted[1], rel=1e-12, abs=1e-15)


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
