"""A rollout that can be enumerated: five binary facts, three of them chosen by the policy. The true gradient is exact.

The policy chooses, with one token each, an answer (right or wrong), a length and a form; what remains of a rollout are
tokens of probability one (copied keys, fixed syntax), which count in every length and have no gradient.

    reward      1 where the answer is right, else 0
    tokens      96 where the rollout is long, else 24
    samples     4 of equal length where it is fragmented, else 1

With probability 1/2 the environment decides whether a rollout is long, otherwise the policy's choice does; likewise for
fragmented. The environment's part depends on the reward r by a dial k in [-1, 1]:

    P(long | choice, r)  =  choice / 2  +  (1 + k (1 - 2 r)) / 4

At k = 0 length and reward are independent, at 1 the environment makes failures long and successes short, at -1 the
reverse. The policy's own choices of length and form never change the reward: the true gradient of their logits is 0.

Suffixes: X inputs, Z = 32 states of a rollout, C = 8 classes (reward, long, fragmented), D parameters.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Index = NDArray[np.intp]

STATES: Index = np.array(list(itertools.product((0, 1), repeat=5)), np.intp)
"""[Z, 5]: answer, chosen length, chosen form, long, fragmented."""
CLASS: Index = STATES[:, 0] * 4 + STATES[:, 3] * 2 + STATES[:, 4]
"""[Z], the class of each state: what advantages and weights can see of it."""
CLASSES = 8
REWARD: Floats = np.repeat([0.0, 1.0], 4)
"""[C]"""
TOKENS: Index = np.tile(np.repeat(np.array([24, 96], np.intp), 2), 2)
"""[C], trained tokens of the rollout."""
SAMPLES: Index = np.tile(np.array([1, 4], np.intp), 4)
"""[C], N_rho."""
ENVIRONMENT = 0.5
"""How often the environment decides instead of the policy."""


def sigmoid(logit: Floats) -> Floats:
    return 1.0 / (1.0 + np.exp(-logit))


@dataclass(frozen=True, kw_only=True)
class Model:
    """The environment and the policy's form. Example: ``Model(length_dial=0.5, sighted=True)``."""

    length_dial: float = 0.0
    """From -1 to 1: how far failures are long; 0 is independent."""
    fragment_dial: float = 0.0
    """From -1 to 1: how far failures fragment; 0 is independent."""
    sighted: bool = False
    """Whether length and form have logits of their own for right and for wrong answers (the policy sees how it goes)."""
    inputs: int = 2
    """Inputs, each with a logit of its own for the answer."""

    def __post_init__(self) -> None:
        for name in ("length_dial", "fragment_dial"):
            if not -1 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in -1..1, got {getattr(self, name)}")

    @property
    def size(self) -> int:
        """D: a logit of the right answer for each input, then those of "long", then those of "drifting form"."""
        return self.inputs + 2 * self.choices

    @property
    def choices(self) -> int:
        """Logits of each free choice: one, or one for each answer."""
        return 2 if self.sighted else 1

    def start(self, success: float, spread: float = 1.6, free: float = 0.5) -> Floats:
        """Parameters [D] whose inputs lie `spread` logits apart around `success`, and whose free choices are `free`."""
        offsets = np.linspace(-spread / 2, spread / 2, self.inputs)
        logits = [_logit(success) + offsets, np.full(2 * self.choices, _logit(free))]
        return np.concatenate(logits)

    def columns(self, answer: Index, input_: Index) -> tuple[Index, Index, Index]:
        """Which parameter each choice of a rollout uses: answer, length, form."""
        seen = answer if self.sighted else np.zeros_like(answer)
        return input_, self.inputs + seen, self.inputs + self.choices + seen

    def happens(self, choice: NDArray[np.intp], answer: Index, dial: float) -> Floats:
        """P(long) or P(fragmented), given the policy's choice and the answer."""
        return (1 - ENVIRONMENT) * choice + ENVIRONMENT * (1 + dial * (1 - 2 * answer)) / 2

    def probabilities(self, theta: Floats) -> Floats:
        """P(state | input), float64 [X, Z]."""
        answer, long_choice, form, long, fragmented = STATES.T
        rows = []
        for x in range(self.inputs):
            p = np.ones(len(STATES))
            for column, value in zip(self.columns(answer, np.full_like(answer, x)), STATES.T[:3], strict=True):
                p *= _bernoulli(sigmoid(theta[column]), value)
            p *= _bernoulli(self.happens(long_choice, answer, self.length_dial), long)
            rows.append(p * _bernoulli(self.happens(form, answer, self.fragment_dial), fragmented))
        return np.stack(rows)

    def scores(self, theta: Floats) -> Floats:
        """Gradient of a rollout's log-probability, summed over its three chosen tokens, float64 [X, Z, D]."""
        score = np.zeros((self.inputs, len(STATES), self.size))
        for x in range(self.inputs):
            used = self.columns(STATES[:, 0], np.full(len(STATES), x))
            for column, value in zip(used, STATES.T[:3], strict=True):
                score[x, np.arange(len(STATES)), column] = value - sigmoid(theta[column])
        return score

    def reward(self, theta: Floats) -> float:
        """J, the expected reward: the mean over inputs of P(right)."""
        return float(sigmoid(theta[: self.inputs]).mean())

    def gradient(self, theta: Floats) -> Floats:
        """The true gradient of J, [D]: p (1 - p) / X for each input's answer and exactly 0 elsewhere."""
        p = sigmoid(theta[: self.inputs])
        return np.concatenate([p * (1 - p) / self.inputs, np.zeros(2 * self.choices)])

    def rates(self, theta: Floats) -> dict[str, float]:
        """How often the policy chooses the long form and the drifting form: overall, and given the answer."""
        p = self.probabilities(theta).mean(0)
        right = STATES[:, 0] == 1
        out = {}
        for name, chosen in (("long", STATES[:, 1]), ("drift", STATES[:, 2])):
            out[name] = float(p @ chosen)
            out[f"{name}_if_right"] = float((p @ (chosen * right)) / (p @ right))
            out[f"{name}_if_wrong"] = float((p @ (chosen * ~right)) / (p @ ~right))
        return out


def _logit(p: float) -> float:
    return float(np.log(p / (1 - p)))


def _bernoulli(p: Floats, value: Index) -> Floats:
    return np.where(value == 1, p, 1 - p)
