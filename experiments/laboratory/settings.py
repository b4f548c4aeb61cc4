"""The estimators under study: the library's own advantages and weights, on many batches in one call.

B batches, R rollouts a batch, all of them with trained tokens; a rollout's samples have equal lengths, so that each
of its tokens has the same weight.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experiments.laboratory.model import TOKENS, Floats, Index
from harnessrl.adapter import rollout_advantages, token_weights

ESTIMATORS = ("grpo", "dr_grpo", "rloo")
UNITS = ("rollout", "sample")
NORMALIZERS = ("token_mean", "seq_mean", "rollout_mean", "constant")
SCALE = float(TOKENS.max())
"""Tokens, for the normaliser "constant": the longest rollout."""


@dataclass(frozen=True)
class Setting:
    """One way to turn a batch into an update."""

    estimator: str
    """Of the advantage."""
    unit: str
    """What counts once in the advantage's statistics."""
    normalizer: str
    """Of the loss."""

    @property
    def name(self) -> str:
        """As in ablations/: unit + normaliser, with the estimator in front."""
        return f"{self.estimator} {self.unit}+{self.normalizer.replace('_', '-')}"


SETTINGS = tuple(Setting(*choice) for choice in itertools.product(ESTIMATORS, UNITS, NORMALIZERS))


def advantages(reward: Floats, samples: Index, groups: int, setting: Setting) -> Floats:
    """`rollout_advantages` of many batches, [B, R]; each batch is `groups` groups of neighbours.

    These estimators look at one group at a time, so one call with all groups gives what a call a batch would.
    """
    flat = rollout_advantages(
        reward.ravel(),
        np.arange(reward.size) // (reward.shape[1] // groups),
        setting.estimator,
        unit=setting.unit,
        samples_per_rollout=samples.ravel(),
    )
    return flat.reshape(reward.shape)


def weights(samples: Index, tokens: Index, normalizer: str) -> Floats:
    """`token_weights` of many batches: the weight of each trained token of every rollout, [B, R].

    One call treats all batches as one; every normaliser divides by one count of the batch (tokens, samples or
    rollouts), which is then replaced by the batch's own.
    """
    count, length = samples.ravel(), (tokens // samples).ravel()
    owner = np.repeat(np.arange(count.size), count)
    weight_S = token_weights(np.repeat(length, count), owner, normalizer, scale=SCALE)
    first = np.cumsum(count) - count
    total = divisor(samples, tokens, normalizer)
    return weight_S[first].reshape(samples.shape) * (total.sum() / total.sum(axis=1, keepdims=True))


def divisor(samples: Index, tokens: Index, normalizer: str) -> NDArray[np.intp]:
    """What each rollout adds to the count that the normaliser divides by."""
    counted = {"token_mean": tokens, "seq_mean": samples}
    return counted.get(normalizer, np.ones_like(samples))
