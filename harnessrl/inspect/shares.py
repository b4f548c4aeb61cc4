"""What rewards and lengths of a trace mean for training: shares of the loss and advantages, an update at a time.

Suffixes: R rollouts of the trace, S samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harnessrl.adapter.baselines import ESTIMATORS, group_index, rollout_advantages, zero_signal_groups
from harnessrl.adapter.normalizers import token_weights

Float64 = NDArray[np.float64]

NORMALIZERS = ("token_mean", "seq_mean", "rollout_mean")
"""The modes whose weights sum to 1; "constant" depends on a scale that no trace knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One rollout's numbers."""

    rollout_id: str
    group_id: str
    step: int | None
    """The step that trained it; None outside a run's trace."""
    reward: float | None
    calls: int
    sampled: int
    """Tokens sampled in all calls."""
    trained: tuple[int, ...]
    """Trained tokens of each sample."""
    breaks: Counter[str]
    """By kind."""
    skipped: Counter[str]
    """Calls by reason."""


def updates(rows: Sequence[Row]) -> list[NDArray[np.intp]]:
    """Rows that one update holds: those of a step; where no step is recorded, all of them."""
    index_R = group_index([row.step for row in rows])
    return [np.flatnonzero(index_R == update) for update in range(int(index_R.max(initial=-1)) + 1)]


def loss_shares(rows: Sequence[Row]) -> dict[str, Float64]:
    """Share of its update's loss weight that each rollout has, by normaliser: float64 [R], summing to 1 an update.

    Unscored rollouts are not trained and have none, unless the whole trace is unscored: then all count.
    """
    unscored = all(row.reward is None for row in rows)
    shares = {mode: np.zeros(len(rows)) for mode in NORMALIZERS}
    for members in updates(rows):
        trained = [rows[r].trained if unscored or rows[r].reward is not None else () for r in members]
        index_S = np.repeat(members, [len(lengths) for lengths in trained])
        length_S = np.array([length for lengths in trained for length in lengths], dtype=np.int64)
        for mode in NORMALIZERS:
            weight_S = token_weights(length_S, index_S, mode)
            shares[mode] += np.bincount(index_S, weights=weight_S * length_S, minlength=len(rows))
    return shares


def relative(rows: Sequence[Row], share_R: Float64) -> Float64:
    """Shares in units of an equal share: 1.0 where a rollout weighs as much as the update's mean; NaN untrained."""
    out = np.full(len(rows), np.nan)
    for members in updates(rows):
        trained = members[share_R[members] > 0]
        out[trained] = share_R[trained] * len(trained)
    return out


def advantages(rows: Sequence[Row]) -> dict[str, Float64]:
    """Advantage of each rollout by estimator, float64 [R]; empty where no group has two scored rollouts."""
    scored = Counter((row.step, row.group_id) for row in rows if row.reward is not None)
    if max(scored.values(), default=0) < 2:
        return {}
    out = {name: np.zeros(len(rows)) for name in ESTIMATORS}
    for members in updates(rows):
        rewards = np.array([np.nan if rows[r].reward is None else rows[r].reward for r in members], np.float64)
        for name in ESTIMATORS:
            out[name][members] = rollout_advantages(rewards, [rows[r].group_id for r in members], name)
    return out


def silent_groups(rows: Sequence[Row]) -> tuple[int, int]:
    """(groups that teach nothing, groups with a scored rollout)."""
    groups = [(row.step, row.group_id) for row in rows]
    rewards = [np.nan if row.reward is None else row.reward for row in rows]
    scored = {group for group, row in zip(groups, rows, strict=True) if row.reward is not None}
    return zero_signal_groups(np.array(rewards, np.float64), groups), len(scored)


def spread(value_R: Float64) -> dict[str, float | None]:
    """Smallest, median and largest; NaN entries are left out."""
    known = value_R[~np.isnan(value_R)]
    if not len(known):
        return {"min": None, "median": None, "max": None}
    return {"min": float(known.min()), "median": float(np.median(known)), "max": float(known.max())}
