"""The exact expected update of a batch of groups: every group that can occur, with its probability.

What advantages and weights see of a group is how many of its rollouts are of each class; for groups of 8 and 8 classes
that is 6435 cases. Each passes once through the library; a policy then only changes their probabilities.

Suffixes: M multisets (possible groups), C classes, X inputs, K quantities.
"""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np

from experiments.laboratory.model import CLASS, CLASSES, REWARD, SAMPLES, TOKENS, Floats, Model
from experiments.laboratory.settings import Setting, advantages, divisor, weights


class Groups:
    """All groups of `size` rollouts, as multisets of classes.

    Args:
        size: rollouts a group; 8 gives 6435 multisets.
        batch: groups a batch, each of an input drawn at random.
    """

    def __init__(self, size: int = 8, batch: int = 16) -> None:
        members = np.array(list(itertools.combinations_with_replacement(range(CLASSES), size)), np.intp)
        self.size, self.batch, self.members = size, batch, members
        self.counts = np.stack([(members == c).sum(1) for c in range(CLASSES)], 1)
        factorial = np.array([math.factorial(n) for n in range(size + 1)], np.float64)
        self.orders = factorial[size] / factorial[self.counts].prod(1)

    @functools.cache  # noqa: B019  one table a setting, for the few Groups of a process
    def coefficients(self, setting: Setting) -> Floats:
        """Weight x advantage of a token, summed over the group's rollouts of each class, [M, C]; the group alone is the batch."""
        classes = self.members
        advantage = advantages(REWARD[classes], SAMPLES[classes], 1, setting)
        product = advantage * weights(SAMPLES[classes], TOKENS[classes], setting.normalizer)
        out = np.zeros(self.counts.shape)
        np.add.at(out, (np.arange(len(classes))[:, None], classes), product)
        return out

    def probabilities(self, class_probability: Floats) -> Floats:
        """P(multiset | input), [X, M], from P(class | input), [X, C]."""
        log_p = np.log(
            np.maximum(class_probability, np.finfo(np.float64).tiny)
        )  # a class that cannot occur: 0 in effect
        return self.orders * np.exp(log_p @ self.counts.T)

    def share(self, class_probability: Floats, normalizer: str) -> Floats:
        """By how much being one group of a batch shrinks the group's own weights, [M]: z * E[1 / (z + others)].

        z is what the normaliser divides by (tokens, samples or rollouts), exact over the other groups of the batch.
        """
        each = divisor(SAMPLES, TOKENS, normalizer)
        small, step = int(each.min()), int(each.max() - each.min())
        own = each[self.members].sum(1).astype(np.float64)
        if step == 0:
            return np.full(len(own), 1.0 / self.batch)
        large = class_probability[:, each > small].sum(1)
        one = np.mean([_binomial(self.size, p) for p in large], axis=0)
        others = functools.reduce(np.convolve, [one] * (self.batch - 1), np.ones(1))
        total = small * self.size * (self.batch - 1) + step * np.arange(len(others))
        kinds, index = np.unique(own, return_inverse=True)
        return (kinds * (others / (kinds[:, None] + total)).sum(1))[index]

    def expected(self, model: Model, theta: Floats, setting: Setting) -> tuple[Floats, float]:
        """The expected update of a batch and the expected sum of weight x advantage over its tokens.

        update = E[sum over rollouts of weight x advantage x gradient of the rollout's log-probability],  [D]
        """
        state = model.probabilities(theta)
        class_p = np.stack([np.bincount(CLASS, p, CLASSES) for p in state])
        joint = state[:, :, None] * model.scores(theta)
        score = np.stack([[joint[x, c == CLASS].sum(0) for c in range(CLASSES)] for x in range(model.inputs)])
        score = np.divide(score, class_p[:, :, None], out=np.zeros_like(score), where=class_p[:, :, None] > 0)
        chance = self.probabilities(class_p) * self.share(class_p, setting.normalizer)
        of_class = self.batch * (chance @ self.coefficients(setting)) / model.inputs
        return np.einsum("xc,xcd->d", of_class, score), float((of_class @ TOKENS).sum())


def _binomial(n: int, p: float) -> Floats:
    return np.array([math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)])
