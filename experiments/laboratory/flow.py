"""What the bias does: follow the expected update exactly, and train with drawn batches many times over."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from experiments.laboratory.draws import draw, updates
from experiments.laboratory.exact import Groups
from experiments.laboratory.model import Floats, Model, sigmoid
from experiments.laboratory.settings import Setting
from experiments.laboratory.tables import Row

STRIDE = 0.05
"""Logits that one step of the flow moves."""


def follow(model: Model, theta: Floats, setting: Setting, groups: Groups, until: float, steps: int) -> Iterator[Row]:
    """Move along the exact expected update in steps of `STRIDE`, until the reward reaches `until`.

    Steps of equal length, so that no setting moves faster for its scale; paths are compared at equal reward.

    Args:
        model: the environment.
        theta: [D], where the path starts.
        setting: the estimator that is followed.
        groups: group and batch size.
        until: reward at which the path ends.
        steps: most steps; a path that does not reach `until` ends here.

    Returns:
        a row a point: step, reward, rates of the free choices.
    """
    for step in range(steps + 1):
        yield {"step": step, "reward": model.reward(theta)} | model.rates(theta)
        if model.reward(theta) >= until:
            return
        update, _ = groups.expected(model, theta, setting)
        theta = theta + STRIDE * update / np.linalg.norm(update)


def rate_for(model: Model, theta: Floats, setting: Setting, groups: Groups, gain: float) -> float:
    """The learning rate at which the first expected update gains `gain` of reward, to first order."""
    update, _ = groups.expected(model, theta, setting)
    return gain / float(update @ model.gradient(theta))


def train(
    model: Model, theta: Floats, setting: Setting, groups: Groups, *, runs: int, steps: int, gain: float, seed: int
) -> Iterator[tuple[int, Floats]]:
    """Plain gradient ascent on drawn batches, `runs` times side by side, at the rate of `rate_for`.

    Yields:
        after each step (0 is the start): its number and all runs' parameters, [runs, D].
    """
    rate, rng = rate_for(model, theta, setting, groups, gain), np.random.default_rng(seed)
    now = np.tile(theta, (runs, 1))
    yield 0, now
    for step in range(1, steps + 1):
        update, _, _ = updates(draw(model, now, groups.batch, groups.size, rng), model.size, setting)
        now = now + rate * update
        yield step, now


def spread(model: Model, theta: Floats) -> Row:
    """Reward and free choices over runs, from [runs, D]: means, and the standard deviation and range of drifting."""
    answer = sigmoid(theta[:, : model.inputs])
    drift = np.array([model.rates(row)["drift"] for row in theta])
    long = np.array([model.rates(row)["long"] for row in theta])
    quantiles = np.quantile(drift, (0.05, 0.95))
    return {
        "reward": float(answer.mean()),
        "reward_sd": float(answer.mean(1).std(ddof=1)),
        "drift": float(drift.mean()),
        "drift_se": float(drift.std(ddof=1) / np.sqrt(len(drift))),
        "drift_sd": float(drift.std(ddof=1)),
        "drift_low": float(quantiles[0]),
        "drift_high": float(quantiles[1]),
        "long": float(long.mean()),
        "long_se": float(long.std(ddof=1) / np.sqrt(len(long))),
    }
