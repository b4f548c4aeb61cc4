"""The losses: pure functions from flat columns of trained tokens to (loss, metrics).

T trained tokens. Every loss is a sum over tokens with weights fixed beforehand (`token_weights`), so any split of the
tokens into packs, micro-batches and ranks adds up to the same loss and gradient; metrics are sums too, for the same reason.
A sequence is one call's response: what was sampled in one go behind one prompt. So no merging strategy changes a loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

Metrics = dict[str, Tensor]

LARGEST = 80.0
"""Log-ratio beyond which a ratio is as good as infinite; float32 overflows at 88.7."""


def sequence_sum(values: Tensor, sequence: Tensor) -> Tensor:
    """The sum over each token's own sequence: out_t = sum of values_u over u with sequence_u = sequence_t.

    Args:
        values: [T].
        sequence: int64 [T], equal for tokens of one sequence; a sequence never crosses a pack.
    Returns:
        [T].
    """
    _, index = sequence.unique(return_inverse=True)
    count = int(index.max()) + 1 if len(index) else 0
    return torch.zeros(count, dtype=values.dtype, device=values.device).index_add(0, index, values)[index]


def sequence_mean(values: Tensor, sequence: Tensor) -> Tensor:
    """The mean over each token's own sequence; see `sequence_sum`."""
    return sequence_sum(values, sequence) / sequence_sum(torch.ones_like(values), sequence)


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    kind: str = "clip",
    sequence: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Policy-gradient loss under a clipped ratio, summed with given weights.

        ratio_t = exp(logprob_t - old_logprob_t),  or exp of that difference's mean over the sequence (kind "gspo")
        c_t     = clip(ratio_t, 1 - clip_low, 1 + clip_high)
        clip:   loss = -sum_t weight_t * min(ratio_t * A_t, c_t * A_t)
        gspo:   the same with the sequence's ratio
        cispo:  loss = -sum_t weight_t * stop_gradient(c_t) * A_t * logprob_t
        dual_clip = d > 1: where A_t < 0 the min is bounded from below by d * A_t

    Without a dual clip the loss of a negative advantage has no bound: a ratio that overflows there makes it infinite.

    Sources: PPO, arXiv:1707.06347, eq. 7; separate bounds, DAPO, arXiv:2503.14476, eq. 10; dual clip, arXiv:1912.09729,
    eq. 5; GSPO, arXiv:2507.18071, eq. 5-7; CISPO, MiniMax-M1, arXiv:2506.13585, eq. 4-5.

    Args:
        logprobs: [T], nats, of the present policy at the sampling temperature; carries the gradient.
        old_logprobs: [T], nats, of the policy that the ratio is taken to.
        advantages: [T], each token's advantage.
        weights: [T], from `token_weights`.
        dual_clip: larger than 1; None is off.
        kind: "clip", "gspo" or "cispo".
        sequence: int64 [T], equal for tokens of one call; needed by "gspo".
    Returns:
        the loss (scalar), and sums over tokens: ratio_sum, clipped (tokens whose clip binds), weight_advantage_sum.
    Raises:
        ValueError: another kind, a dual clip of 1 or less, "gspo" without sequences.
    """
    if kind not in ("clip", "gspo", "cispo"):
        raise ValueError(f"kind must be clip, gspo or cispo, got {kind!r}")
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip must be larger than 1, got {dual_clip}")
    balance = (weights.double() * advantages.double()).sum()
    advantages, weights = advantages.to(logprobs.dtype), weights.to(logprobs.dtype)
    log_ratio = logprobs - old_logprobs
    if kind == "gspo":
        if sequence is None:
            raise ValueError("kind gspo needs sequence")
        log_ratio = sequence_mean(log_ratio, sequence)
    # Where a clip binds or a factor is 0 there is no gradient whatever the ratio: an overflow would make that 0 a nan.
    bounded = (advantages >= 0) | (weights == 0) | (dual_clip is not None)
    log_ratio = torch.where(bounded, log_ratio.clamp(max=LARGEST), log_ratio)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    if kind == "cispo":
        surrogate = clipped.detach() * advantages * logprobs
        binding = clipped != ratio
    else:
        surrogate = torch.minimum(ratio * advantages, clipped * advantages)
        binding = clipped * advantages < ratio * advantages
    if dual_clip is not None and kind != "cispo":
        floor = dual_clip * advantages
        binding = binding | ((advantages < 0) & (surrogate < floor))
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, floor), surrogate)
    loss = -(weights * surrogate).sum()
    return loss, {"ratio_sum": ratio.detach().sum(), "clipped": binding.sum(), "weight_advantage_sum": balance}


def importance_weights(
    old_logprobs: Tensor,
    engine_logprobs: Tensor,
    *,
    level: str,
    threshold: float = 2.0,
    mask_below: float = 0.0,
    mask_above: float = float("inf"),
    sequence: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Truncated importance weights from the engine's distribution to the trainer's, without gradient.

        rho_t = exp(old_logprob_t - engine_logprob_t)            (level "token")
        rho_t = exp(sum of that difference over the sequence)    (level "sequence")
        w_t   = min(rho_t, threshold), or 0 where rho_t < mask_below or rho_t > mask_above

    Sources: truncation at 2 on tokens, arXiv:2608.17528; on sequences and for engine-trainer mismatch, F. Yao et al.,
    "Your efficient RL framework secretly brings you off-policy RL training", 2025; two-sided masks, IcePop (Ring, 2025).

    Args:
        old_logprobs: [T], nats, the trainer's own before the first update.
        engine_logprobs: [T], nats, as recorded.
        level: "none" (all ones; masks still act on tokens), "token" or "sequence".
        threshold: largest weight.
        mask_below: ratios below it get weight 0; 0 is off.
        mask_above: ratios above it get weight 0; inf is off.
        sequence: int64 [T], needed by "sequence".
    Returns:
        weights [T], and sums over tokens: importance_sum, truncated and masked (counts).
    Raises:
        ValueError: another level, or "sequence" without sequences.
    """
    if level not in ("none", "token", "sequence"):
        raise ValueError(f"level must be none, token or sequence, got {level!r}")
    with torch.no_grad():
        log_ratio = old_logprobs - engine_logprobs
        if level == "sequence":
            if sequence is None:
                raise ValueError("level sequence needs sequence")
            log_ratio = sequence_sum(log_ratio, sequence)
        ratio = log_ratio.clamp(-50, 50).exp()
        masked = (ratio < mask_below) | (ratio > mask_above)
        truncated = (ratio > threshold) & ~masked & (level != "none")
        weights = ratio.clamp(max=threshold) if level != "none" else torch.ones_like(ratio)
        weights = weights.masked_fill(masked, 0.0)
    return weights, {"importance_sum": weights.sum(), "truncated": truncated.sum(), "masked": masked.sum()}


def kl_values(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """KL(policy || reference) at sampled tokens, by Schulman's estimators ("Approximating KL divergence", 2020).

        d_t = logprob_t - reference_t;   k1 = d,   k2 = d^2 / 2,   k3 = exp(-d) - 1 + d

    Args:
        logprobs: [T], nats, of the policy that sampled.
        reference: [T], nats, of the frozen reference.
        estimator: "k1", "k2" or "k3". In a loss, the gradient of k1 has mean zero under the policy; k2 and k3 pull.
    Returns:
        [T], nats.
    """
    d = logprobs - reference
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        return torch.exp(-d) - 1 + d
    raise ValueError(f"KL estimator must be k1, k2 or k3, got {estimator!r}")


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """sum_t weight_t * value_t: how the KL and entropy terms enter the loss, with the weights of the policy's term."""
    return (weights.to(values.dtype) * values).sum()
