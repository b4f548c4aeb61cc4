"""From rewards to advantages: one number a rollout, and its split over the rollout's calls.

Suffixes: R rollouts, G groups, C calls of a rollout, L tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from harnessrl.adapter import checks
from harnessrl.adapter.checks import Float64
from harnessrl.adapter.types import Sample

Index = NDArray[np.intp]

ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline")
UNITS = ("rollout", "sample")
SCHEMES = ("identical", "discounted", "mean_preserving")
LARGEST = 1e300
"""Rewards beyond this are refused, infinities among them: their sums would not be finite."""


def rollout_advantages(
    rewards: ArrayLike,
    group_ids: Iterable[Hashable],
    estimator: str = "grpo",
    *,
    unit: str = "rollout",
    samples_per_rollout: ArrayLike | None = None,
    eps: float = 1e-6,
) -> Float64:
    """Compute one advantage a rollout, before anything is dropped; every sample of the rollout inherits it.

    With mean_g, std_g (ddof 1) and n_g over the scored rollouts of the group, std_b (ddof 0) over the scored batch::

        grpo                    (r - mean_g) / (std_g + eps)
        dr_grpo                  r - mean_g
        rloo                     r - mean of the group's others  =  (r - mean_g) * n_g / (n_g - 1)
        reinforce_pp            (r - mean_b) / (std_b(r) + eps)
        reinforce_pp_baseline   (r - mean_g) / (std_b(r - mean_g) + eps)

    A NaN (or None) reward is unscored: outside every statistic, advantage 0. Equal rewards give exact zeros, and so
    does a group with one scored rollout; ``reinforce_pp`` has no groups and is not zeroed by that rule. Deviations are
    two-pass float64, so with ``eps=0`` rewards near 1000 that differ by 0.001 keep their digits. Squares are taken of
    deviations that are scaled by a power of two first, so that rewards of 1e200 or 1e-200 keep theirs.

    Args:
        rewards: [R], final rewards, any unit, within +-1e300; NaN or None where unscored. A rollout that failed on its own account is
            scored (its failure reward), else the negative signal is lost.
        group_ids: [R], equal for rollouts of one input; strings, integers or anything hashable.
        estimator: one of ``ESTIMATORS``.
        unit: "rollout" (neutral), or "sample": every statistic is taken as if each sample were its own rollout, the
            practice that the paper argues against.
        samples_per_rollout: int [R], read by unit="sample" only; a rollout of 0 samples is then outside as well.
        eps: added to a standard deviation before dividing; 0 adds nothing (a zero deviation still gives zeros).

    Returns:
        float64 [R].

    Raises:
        ValueError: unknown estimator or unit, lengths that differ, a reward that is no number or is infinite, group ids that
            cannot be hashed, an eps or count that is negative or not finite, advantages that are beyond float64.

    Source: arXiv:2608.17528 (v1.0), the rollout as the unit of the baseline, figure 4.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator {estimator!r} is unknown; allowed: {', '.join(ESTIMATORS)}")
    if checks.number(eps, "eps") < 0:
        raise ValueError(f"eps must be finite and not negative, got {eps}")
    reward_R = checks.numbers(rewards, "rewards")
    group_R = group_index(group_ids)
    if len(group_R) != len(reward_R):
        raise ValueError(f"rewards has length {len(reward_R)}, group_ids has length {len(group_R)}")
    refused_R = np.abs(reward_R) > LARGEST
    if refused_R.any():
        at = int(np.argmax(refused_R))
        raise ValueError(f"rewards[{at}] is {reward_R[at]}; rewards lie within +-{LARGEST}, or are NaN where unscored")
    count_R = np.where(np.isnan(reward_R), 0.0, _counts(unit, samples_per_rollout, len(reward_R)))
    batch_R = np.zeros_like(group_R)
    with np.errstate(over="ignore", invalid="ignore"):
        deviation_R = _deviations(reward_R, batch_R if estimator == "reinforce_pp" else group_R, count_R)
        if estimator == "dr_grpo":
            advantage_R = deviation_R
        elif estimator == "rloo":
            size_R = _sums(group_R, count_R)[group_R]
            advantage_R = _divide(deviation_R * size_R, size_R - 1)
        elif estimator == "grpo":
            advantage_R = _divide(deviation_R, _std(deviation_R, group_R, count_R, ddof=1) + eps)
        else:
            advantage_R = _divide(deviation_R, _std(deviation_R, batch_R, count_R, ddof=0) + eps)
    return checks.finite(advantage_R, f"rewards, as {estimator} advantages,")


def zero_signal_groups(rewards: ArrayLike, group_ids: Iterable[Hashable]) -> int:
    """Count the groups that have a scored rollout but teach nothing: one scored rollout, or equal rewards.

    Args:
        rewards: [R], NaN or None where unscored.
        group_ids: [R], as for ``rollout_advantages``.

    Returns:
        The number of such groups; groups without any scored rollout are not counted.

    Raises:
        ValueError: as ``rollout_advantages``.
    """
    reward_R, group_R = checks.numbers(rewards, "rewards"), group_index(group_ids)
    signal_R = rollout_advantages(reward_R, group_R, "dr_grpo") != 0.0
    return len(np.unique(group_R[~np.isnan(reward_R)])) - len(np.unique(group_R[signal_R]))


def assign_credit(
    advantage: float,
    call_rewards: ArrayLike,
    scheme: str = "identical",
    *,
    call_tokens: ArrayLike | None = None,
    gamma: float = 0.99,
) -> Float64:
    """Split a rollout's advantage A over its calls, i = 1..C, with call rewards q and n trained tokens a call.

    ::

        identical         A_i = A
        discounted        A_i = gamma^(C-i) * A + sum_{j >= i} gamma^(j-i) * q_j
        mean_preserving   A_i = A + q_i - (sum_j n_j * q_j) / (sum_j n_j)

    ``discounted`` with gamma=1 and no call rewards is ``identical``. ``mean_preserving`` moves credit between calls and
    leaves sum_i n_i * A_i / sum_i n_i = A, so rollouts stay equally weighted; equal call rewards change nothing. For
    credit that includes later calls, pass it a return-to-go as call_rewards.

    Args:
        advantage: the rollout's, from ``rollout_advantages``.
        call_rewards: [C], one intermediate reward a trained call in the order of the calls, in units of the advantage;
            0.0 where there is none.
        scheme: one of ``SCHEMES``.
        call_tokens: int [C], trained tokens of each call, read by mean_preserving; None counts every call alike, which
            preserves the token-weighted mean only where calls have equal lengths.
        gamma: discount a call, from 0 to 1, read by discounted; 1 does not discount.

    Returns:
        float64 [C], the advantage of each call's tokens.

    Raises:
        ValueError: unknown scheme, a value that is no finite number, lengths that differ, tokens that are not whole or
            negative, gamma outside 0..1, a credit that is beyond float64.

    Source: arXiv:2508.03680 (v0), credit assignment of LightningRL (identical); the other two are ours.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"scheme {scheme!r} is unknown; allowed: {', '.join(SCHEMES)}")
    advantage = checks.number(advantage, "advantage")
    if not 0 <= checks.number(gamma, "gamma") <= 1:
        raise ValueError(f"gamma must lie in 0..1, got {gamma}")
    reward_C = checks.numbers(call_rewards, "call_rewards")
    if not np.isfinite(reward_C).all():
        at = int(np.argmin(np.isfinite(reward_C)))
        raise ValueError(f"call_rewards[{at}] is {reward_C[at]}; use 0.0 where a call has no reward of its own")
    tokens_C = (
        np.ones(len(reward_C)) if call_tokens is None else checks.wholes(call_tokens, "call_tokens").astype(float)
    )
    if len(tokens_C) != len(reward_C):
        raise ValueError(f"call_tokens has length {len(tokens_C)}, call_rewards has length {len(reward_C)}")
    if scheme == "identical":
        return np.full(len(reward_C), advantage)
    with np.errstate(over="ignore", invalid="ignore"):
        if scheme == "mean_preserving":
            one_rollout_C = np.zeros(len(reward_C), dtype=np.intp)
            credit_C = advantage + _deviations(reward_C, one_rollout_C, tokens_C)
        else:
            credit_C, running = np.empty(len(reward_C)), advantage
            for call in reversed(range(len(reward_C))):
                running = reward_C[call] + (running if call == len(reward_C) - 1 else gamma * running)
                credit_C[call] = running
    return checks.finite(credit_C, f"call_rewards and advantage, as {scheme} credit,")


def token_advantages(sample: Sample, credit: Mapping[str, float]) -> Float64:
    """Spread call credits over a sample's tokens: A[t] = credit[call that sampled t], 0.0 on context.

    Args:
        sample: one sample; its spans name the calls.
        credit: call_id -> advantage, for every trained call of the sample (``assign_credit``).

    Returns:
        float64 [L], ready for ``pack(advantages=...)``.

    Raises:
        ValueError: a span whose call has no credit, or a credit that is no finite number.
    """
    advantage_L = np.zeros(len(sample.token_ids))
    for span in sample.spans:
        if span.call_id not in credit:
            raise ValueError(f"rollout {sample.rollout_id!r}, call {span.call_id!r}: no credit was given")
        name = f"rollout {sample.rollout_id!r}, call {span.call_id!r}: credit"
        advantage_L[span.start : span.stop] = checks.number(credit[span.call_id], name)
    return advantage_L


def group_index(group_ids: Iterable[Hashable]) -> Index:
    """Number the groups 0..G-1 in order of first appearance; a dict, so linear and blind to the ids' type."""
    if hasattr(group_ids, "__array__"):  # tensors and arrays would yield elements that hash by identity
        group_ids = checks.array(group_ids, "group_ids").reshape(-1).tolist()
    seen: dict[Hashable, int] = {}
    try:
        return np.array([seen.setdefault(group, len(seen)) for group in group_ids], dtype=np.intp)
    except TypeError as error:
        raise ValueError(f"group_ids must be a list of ids that can be hashed: {error}") from error


def _counts(unit: str, samples_per_rollout: ArrayLike | None, length: int) -> Float64:
    """How often a rollout counts in every statistic: once, or once a sample."""
    if unit not in UNITS:
        raise ValueError(f"unit {unit!r} is unknown; allowed: {', '.join(UNITS)}")
    if unit == "rollout":
        return np.ones(length)
    if samples_per_rollout is None:
        raise ValueError('unit="sample" takes samples_per_rollout, one count a rollout')
    count_R = checks.wholes(samples_per_rollout, "samples_per_rollout")
    if len(count_R) != length:
        raise ValueError(f"rewards has length {length}, samples_per_rollout has length {len(count_R)}")
    return count_R.astype(np.float64)


def _deviations(value_R: Float64, pool_R: Index, count_R: Float64) -> Float64:
    """value - mean of its pool, 0.0 where the count is 0.

    Values are taken relative to the pool's first one before averaging: equal values then deviate by exactly 0.0, where
    a plain mean of three times 0.1 is off by one bit.
    """
    counted_R = np.flatnonzero(count_R > 0)
    first_G = np.zeros(int(pool_R.max(initial=-1)) + 1)
    first_G[pool_R[counted_R[::-1]]] = value_R[counted_R[::-1]]  # the last assignment stands: the pool's first value
    offset_R = np.where(count_R > 0, value_R - first_G[pool_R], 0.0)
    mean_G = _divide(_sums(pool_R, count_R * offset_R), _sums(pool_R, count_R))
    return np.where(count_R > 0, offset_R - mean_G[pool_R], 0.0)


def _std(deviation_R: Float64, pool_R: Index, count_R: Float64, *, ddof: int) -> Float64:
    """Second pass: the root of the pool's mean squared deviation, spread back over its members.

    Deviations are divided by a power of two first, which changes no digit: the square of 1e200 is no float64.
    """
    largest_G = np.zeros(int(pool_R.max(initial=-1)) + 1)
    np.maximum.at(largest_G, pool_R, np.abs(deviation_R))
    scale_G = np.exp2(np.frexp(largest_G)[1])
    square_G = _sums(pool_R, count_R * (deviation_R / scale_G[pool_R]) ** 2)
    return (scale_G * np.sqrt(_divide(square_G, _sums(pool_R, count_R) - ddof)))[pool_R]


def _sums(pool_R: Index, value_R: Float64) -> Float64:
    """Sum a pool; the cast matters for no rollouts at all, where bincount returns integers."""
    return np.bincount(pool_R, weights=value_R).astype(np.float64, copy=False)


def _divide(numerator: Float64, denominator: Float64) -> Float64:
    """Quotient where the denominator is positive, else 0.0."""
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 0)
