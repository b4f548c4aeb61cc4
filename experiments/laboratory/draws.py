"""Drawn batches: what the exact expectation leaves out (variance), and training with noise.

B batches (or training runs) side by side, each with its own parameters; P groups of G rollouts, R = P * G.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from experiments.laboratory.model import Floats, Index, Model, sigmoid
from experiments.laboratory.settings import Setting, advantages, weights


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Rollouts of B batches."""

    groups: int
    """P, groups a batch; a group's rollouts are neighbours and share the input."""
    answer: Index
    """[B, R], 1 where right: the reward."""
    tokens: Index
    """[B, R], trained tokens."""
    samples: Index
    """[B, R], N_rho."""
    columns: Index
    """[3, B, R], the parameter that each choice used."""
    surprise: Floats
    """[3, B, R], choice - P(choice = 1): the gradient of the choice's log-probability in that parameter."""


def draw(model: Model, theta: Floats, groups: int, size: int, rng: np.random.Generator) -> Drawn:
    """Draw a batch for each row of theta, [B, D]."""
    shape, row = (len(theta), groups * size), np.arange(len(theta))[:, None]
    input_ = np.repeat(rng.integers(model.inputs, size=(len(theta), groups)), size, axis=1)
    answer = (rng.random(shape) < sigmoid(theta[row, input_])).astype(np.intp)
    columns = np.stack(model.columns(answer, input_))
    chance = sigmoid(theta[row, columns])
    chosen = np.stack([answer, *(rng.random((2, *shape)) < chance[1:]).astype(np.intp)])
    long = rng.random(shape) < model.happens(chosen[1], answer, model.length_dial)
    fragmented = rng.random(shape) < model.happens(chosen[2], answer, model.fragment_dial)
    return Drawn(
        groups=groups,
        answer=answer,
        tokens=np.where(long, 96, 24),
        samples=np.where(fragmented, 4, 1),
        columns=columns,
        surprise=chosen - chance,
    )


def updates(drawn: Drawn, size: int, setting: Setting) -> tuple[Floats, Floats, Floats]:
    """Each batch's update [B, D], its sum of weight x advantage [B], and the share of weight on failed rollouts [B]."""
    weight = weights(drawn.samples, drawn.tokens, setting.normalizer)
    product = weight * advantages(drawn.answer.astype(np.float64), drawn.samples, drawn.groups, setting)
    batch = np.arange(len(product))[:, None]
    flat = (batch * size + drawn.columns).ravel()
    update = np.bincount(flat, (product * drawn.surprise).ravel(), len(product) * size).reshape(-1, size)
    mass = weight * drawn.tokens
    failed = (mass * (1 - drawn.answer)).sum(1) / mass.sum(1)
    return update, (product * drawn.tokens).sum(1), failed
