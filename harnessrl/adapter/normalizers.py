"""Loss normalisation as weights: ``loss = sum(weight[s] * token_loss)``, whatever the split into packs and ranks.

Suffixes: S samples, R rollouts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from harnessrl.adapter import checks
from harnessrl.adapter.checks import Float64

MODES = ("token_mean", "seq_mean", "rollout_mean", "constant")


def token_weights(
    lengths: ArrayLike,
    rollout_index: ArrayLike,
    mode: str = "rollout_mean",
    *,
    num_rollouts: int | None = None,
    scale: float | None = None,
) -> Float64:
    """Compute the weight of each trained token of every sample, once per optimizer update, from global counts.

    With n_s trained tokens of sample s, N_r trained tokens of its rollout, S samples and R rollouts that have any::

        token_mean     1 / sum(n)
        seq_mean       1 / (S * n_s)
        rollout_mean   1 / (R * N_r)
        constant       1 / (R * scale)      (Dr. GRPO)

    The first three make the weights of all trained tokens sum to 1 (over R rollouts, as counted). A normaliser is
    weights and not a reduction: micro-batches, packs and ranks only sum, so any split gives the same loss and gradient.

    Args:
        lengths: int [S], *trained* tokens of each sample that the loss will score; 0 where there are none and for
            samples of unscored rollouts: weight 0, counted nowhere.
        rollout_index: int [S], equal for samples of one rollout, not negative.
        mode: one of ``MODES``.
        num_rollouts: R where it is not the number of rollouts with a trained token in `lengths`; None counts them.
            Read by rollout_mean and constant.
        scale: tokens, read by constant only and needed there (the response budget, say).

    Returns:
        float64 [S].

    Raises:
        ValueError: unknown mode, lengths that differ, negative or fractional entries, scale not finite and positive,
            num_rollouts not whole, negative, or 0 where there are trained tokens, constant without scale, a scale that
            makes a weight 0 or infinite.

    Source: arXiv:2608.17528 (v1.0), loss normalisation, figure 5: lengths 50, 100 | 30, 30, 30 | 40 give the three
    rollouts (150, 90, 40)/280, (2, 3, 1)/6 and 1/3 each.
    """
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is unknown; allowed: {', '.join(MODES)}")
    length_S, rollout_S = checks.wholes(lengths, "lengths"), checks.wholes(rollout_index, "rollout_index")
    if len(length_S) != len(rollout_S):
        raise ValueError(f"lengths has length {len(length_S)}, rollout_index has length {len(rollout_S)}")
    if mode == "constant" and scale is None:
        raise ValueError('mode="constant" takes scale, in tokens')
    if scale is not None and checks.number(scale, "scale") <= 0:
        raise ValueError(f"scale must be finite and positive, got {scale}")
    if num_rollouts is not None:
        (num_rollouts,) = checks.wholes([num_rollouts], "num_rollouts").tolist()
    trained_S = length_S > 0
    weight_S = np.zeros(len(length_S))
    if not trained_S.any():
        return weight_S
    if num_rollouts == 0:
        raise ValueError("num_rollouts must be positive where there are trained tokens, got 0")
    length_T = length_S[trained_S].astype(np.float64)
    ids_R, rollout_T = np.unique(rollout_S[trained_S], return_inverse=True)
    rollouts = len(ids_R) if num_rollouts is None else num_rollouts
    if mode == "token_mean":
        weight_S[trained_S] = 1.0 / length_T.sum()
    elif mode == "seq_mean":
        weight_S[trained_S] = 1.0 / (len(length_T) * length_T)
    elif mode == "rollout_mean":
        weight_S[trained_S] = 1.0 / (rollouts * np.bincount(rollout_T, weights=length_T)[rollout_T])
    else:
        assert scale is not None
        weight_S[trained_S] = 1.0 / (rollouts * float(scale))
    if not weight_S[trained_S].min() > 0:
        raise ValueError(f"scale and num_rollouts are too large: weights of {mode} come out as 0")
    return checks.finite(weight_S, f"scale {scale} is too small: weights")
