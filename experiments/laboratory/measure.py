"""Bias and variance of one setting at one policy, against the true gradient g.

bias      of the exact expected update m = E[u]: angle to g, and parts of m / |m| that lengthen or fragment rollouts,
          where g is 0
variance  of drawn batches: signal to noise |m|^2 / tr Cov(u), and the error of the best multiple of u,
          min_c E|c u - g|^2 / |g|^2  =  1 - (m g)^2 / (|g|^2 (|m|^2 + tr Cov u))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from experiments.laboratory.draws import Drawn, draw, updates
from experiments.laboratory.exact import Groups
from experiments.laboratory.model import Floats, Model
from experiments.laboratory.settings import SETTINGS, Setting
from experiments.laboratory.tables import Row


def angle(update: Floats, gradient: Floats) -> float:
    """Degrees between two vectors, from the sine and the cosine: exact near 0, where an arc cosine is not."""
    unit, true = update / np.linalg.norm(update), gradient / np.linalg.norm(gradient)
    along = float(unit @ true)
    return float(np.degrees(np.arctan2(np.linalg.norm(unit - along * true), along)))


def measure(
    model: Model, theta: Floats, groups: Groups, batches: int, rng: np.random.Generator, settings: Sequence[Setting]
) -> Iterator[Row]:
    """One row a setting; all settings see the same drawn batches. `_se` columns are standard errors of the draws.

    Args:
        model: the environment.
        theta: [D], the policy.
        groups: group and batch size.
        batches: how many batches are drawn.
        rng: of the draws.
        settings: what to compare.
    """
    drawn = draw(model, np.broadcast_to(theta, (batches, model.size)), groups.batch, groups.size, rng)
    about = {"length_correlation": _failing(drawn, drawn.tokens), "samples_correlation": _failing(drawn, drawn.samples)}
    for setting in settings:
        yield describe(setting) | about | _row(model, theta, setting, groups, drawn)


def describe(setting: Setting) -> Row:
    """The columns that name a setting."""
    return {"estimator": setting.estimator, "unit": setting.unit, "normalizer": setting.normalizer}


def _row(model: Model, theta: Floats, setting: Setting, groups: Groups, drawn: Drawn) -> Row:
    truth = model.gradient(theta)
    mean, balance = groups.expected(model, theta, setting)
    update, _, failed = updates(drawn, model.size, setting)
    power, along = float(mean @ mean), float(mean @ truth)
    squared = ((update - update.mean(0)) ** 2).sum(1) * len(update) / (len(update) - 1)
    trace, trace_se = float(squared.mean()), float(squared.std(ddof=1) / np.sqrt(len(update)))
    explained = along**2 / (truth @ truth)
    unit = mean / np.sqrt(power)
    length, form = unit[model.inputs : model.inputs + model.choices], unit[model.inputs + model.choices :]
    return {
        "angle_degrees": angle(mean, truth),
        "relative_bias": float(np.sin(np.radians(angle(mean, truth)))),
        "push_long_if_right": float(length[-1]),
        "push_long_if_wrong": float(length[0]),
        "push_fragment_if_right": float(form[-1]),
        "push_fragment_if_wrong": float(form[0]),
        "norm": np.sqrt(power),
        "variance": trace,
        "variance_se": trace_se,
        "signal_to_noise": power / trace,
        "signal_to_noise_se": power / trace**2 * trace_se,
        "error": 1 - explained / (power + trace),
        "error_se": explained / (power + trace) ** 2 * trace_se,
        "weight_advantage_sum": balance,
        "weight_on_failed": float(failed.mean()),
        "weight_on_failed_se": float(failed.std(ddof=1) / np.sqrt(len(failed))),
        "largest_z": float(deviation(update, mean)),
    }


def deviation(update: Floats, mean: Floats) -> float:
    """How many standard errors the mean of drawn updates lies from the exact one, in the worst component."""
    error = update.std(0, ddof=1) / np.sqrt(len(update))
    return float(np.max(np.abs(update.mean(0) - mean) / error))


def _failing(drawn: Drawn, value: Floats) -> float:
    """Correlation with failure over all drawn rollouts."""
    return float(np.corrcoef(1 - drawn.answer.ravel(), value.ravel())[0, 1])


def sweep(
    groups: Groups, batches: int, seed: int, dials: Sequence[float], successes: Sequence[float]
) -> Iterator[tuple[Model, Row]]:
    """The bias table: each dial alone, both together, for blind and sighted policies and several success rates."""
    places = dict.fromkeys([pair for dial in dials for pair in ((dial, 0.0), (0.0, dial), (dial, dial))])
    for sighted in (False, True):
        for success in successes:
            for length_dial, fragment_dial in places:
                model = Model(length_dial=length_dial, fragment_dial=fragment_dial, sighted=sighted)
                rng = np.random.default_rng(seed)
                for row in measure(model, model.start(success), groups, batches, rng, SETTINGS):
                    yield model, {"success": success} | row
