"""The losses: pure functions from flat columns of trained tokens to (loss, metrics).

T trained tokens. Every function is a sum over tokens with weights fixed beforehand (`token_weights`), so any split of the
tokens into packs, micro-batches and ranks adds up to the same loss and gradient. Metrics are sums too, for the same reason.
"""

from __future__ import annotations

import torch
from torch import Tensor

Metrics = dict[str, Tensor]


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, weights: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Metrics]:
    """Clipped surrogate of PPO, as GRPO uses it, summed with given weights.

        ratio_t = exp(logprob_t - old_logprob_t)
        loss    = -sum_t weight_t * min(ratio_t * A_t, clip(ratio_t, 1 - clip_low, 1 + clip_high) * A_t)

    Source: Schulman et al., arXiv:1707.06347, eq. 7; separate bounds from DAPO, arXiv:2503.14476, eq. 10.

    Args:
        logprobs: [T], nats, of the present policy at the sampling temperature; carries the gradient.
        old_logprobs: [T], nats, of the policy that the ratio is taken to.
        advantages: [T], each token's advantage.
        weights: [T], from `token_weights`; sums to 1 over the update for the means.
    Returns:
        the loss (scalar), and sums over tokens: ratio_sum, clipped (count), weight_advantage_sum.
    """
    balance = (weights.double() * advantages.double()).sum()
    advantages, weights = advantages.to(logprobs.dtype), weights.to(logprobs.dtype)
    # A token of advantage 0 has no gradient whatever its ratio; an overflow to inf would turn that 0 into nan.
    log_ratio = torch.where(advantages == 0, (logprobs - old_logprobs).clamp(-20, 20), logprobs - old_logprobs)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    loss = -(weights * surrogate).sum()
    with torch.no_grad():
        binding = (clipped * advantages < ratio * advantages).sum()
        metrics = {
            "ratio_sum": ratio.sum(),
            "clipped": binding,
            "weight_advantage_sum": balance,
        }
    return loss, metrics


def kl_loss(logprobs: Tensor, reference: Tensor, weights: Tensor, *, estimator: str) -> Tensor:
    """Weighted KL(policy || reference) from sampled tokens, by Schulman's estimators ("Approximating KL divergence", 2020).

        d_t = logprob_t - reference_t;   k1 = d,   k2 = d^2 / 2,   k3 = exp(-d) - 1 + d

    Args:
        logprobs: [T], nats, carries the gradient.
        reference: [T], nats, of the frozen reference.
        weights: [T].
        estimator: "k1", "k2" or "k3". In a loss, the gradient of k1 has mean zero under the policy; k2 and k3 pull.
    Returns:
        the loss (scalar).
    """
    d = logprobs - reference
    if estimator == "k1":
        value = d
    elif estimator == "k2":
        value = d.square() / 2
    elif estimator == "k3":
        value = torch.exp(-d) - 1 + d
    else:
        raise ValueError(f"KL estimator must be k1, k2 or k3, got {estimator!r}")
    return (weights.to(d.dtype) * value).sum()
