"""The two primary outcomes: paired differences to (rollout, rollout-mean), and the probability that a run is higher."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from harnessrl.report import seeds_of
from harnessrl.results import PRIMARY, Results
from harnessrl.statistics import (
    ENOUGH_SEEDS,
    Strata,
    bootstrap_interval,
    interquartile_mean,
    interval,
    mean_iqm,
    paired_differences,
    probability_of_improvement,
)
from paper_figs import curves
from paper_figs.style import add_note, label_panels, line_style

DATA = curves.tables("lookup")[:1]
ALSO = curves.tables("babyai")[:1]
MAKE = curves.make("lookup")
rebuild = curves.rebuild

Point = tuple[float, float, float]
"""Value, low and high end of its 95 % interval. Below five seeds these are the range of a difference, else NaN."""
NONE = float("nan")


def numbers(root: Path) -> dict[str, Any]:
    """By outcome: differences by task (and of all tasks) and setting; probabilities by task; seeds by task."""
    tasks = curves.read_tasks(root)
    return {
        "outcomes": {
            key: {
                "difference": by_task(tasks, key, difference) | stratified(list(tasks.values()), key),
                "probability": by_task(tasks, key, probability),
            }
            for key in PRIMARY
        },
        "seeds": {task: seeds_of(results) for task, results in tasks.items()},
    }


def by_task(tasks: dict[str, Results], key: str, compared: Any) -> dict[str, dict[str, Point]]:
    """Each task's settings against its reference."""
    return {
        task: {
            setting: compared(results.outcome(setting, key), results.outcome(curves.REFERENCE, key))
            for setting in others(results)
        }
        for task, results in tasks.items()
    }


def others(results: Results) -> list[str]:
    return [name for name in results.settings if name != curves.REFERENCE and curves.REFERENCE in results.settings]


def difference(ours: dict[int, float], theirs: dict[int, float]) -> Point:
    """Interquartile mean of the differences on common seeds."""
    values = paired_differences(ours, theirs)
    if not len(values):
        return NONE, NONE, NONE
    low, high = interval(values)
    return float(interquartile_mean(values)), float(low), float(high)


def probability(ours: dict[int, float], theirs: dict[int, float]) -> Point:
    """Probability that a run of ours is higher, of all pairs of runs; both sets of seeds are resampled for the interval."""
    strata = [np.array(list(values.values())) for values in (ours, theirs)]
    value = probability_of_improvement(*strata)
    if min(map(len, strata)) < ENOUGH_SEEDS:
        return value, NONE, NONE
    low, high = bootstrap_interval(strata, _resampled_probability, draws=2000)
    return value, float(low), float(high)


def _resampled_probability(strata: Strata) -> np.ndarray:
    ours, theirs = strata[0][:, None], strata[1][None]
    return ((ours > theirs) + 0.5 * (ours == theirs)).mean(axis=(0, 1))


def stratified(tasks: Sequence[Results], key: str) -> dict[str, dict[str, Point]]:
    """The differences of all tasks together, seeds resampled within each; nothing for a single task."""
    found: dict[str, Point] = {}
    if len(tasks) < 2:
        return {}
    for setting in [name for name in others(tasks[0]) if all(name in others(task) for task in tasks)]:
        strata = [paired_differences(task.outcome(setting, key), task.outcome(curves.REFERENCE, key)) for task in tasks]
        if all(len(values) for values in strata):
            enough = min(map(len, strata)) >= ENOUGH_SEEDS
            low, high = bootstrap_interval(strata) if enough else (NONE, NONE)
            found[setting] = float(mean_iqm(strata)), float(low), float(high)
    return {"all tasks": found}


def draw(figure: Figure, found: dict[str, Any]) -> None:
    """A row an outcome: a panel of differences for each task, on its own scale, then the probabilities of all."""
    names = list(dict.fromkeys(name for parts in found["outcomes"].values() for name in parts["difference"]))
    differences = [one for parts in found["outcomes"].values() for one in parts["difference"].values()]
    settings = list(dict.fromkeys(setting for points in differences for setting in points))
    figure.set_size_inches(2.2 + 2.3 * (len(names) + 1), 5.0)
    axes = figure.subplots(len(PRIMARY), len(names) + 1, squeeze=False, sharey=True)
    for row, (key, parts) in zip(axes, found["outcomes"].items(), strict=True):
        for at, name in enumerate(names):
            _points(row[at], {name: parts["difference"][name]}, settings, at)
            row[at].axvline(0, color="black", linewidth=0.8)
            row[at].set(title=f"{PRIMARY[key]}, {name}", xlabel="paired difference")
        _points(row[-1], parts["probability"], settings)
        row[-1].axvline(0.5, color="black", linewidth=0.8)
        row[-1].set(title="probability of more", xlabel="of all pairs of runs", xlim=(-0.05, 1.05))
    label_panels(axes.flat)
    figure.legend(*axes[0, -1].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    seeds = ", ".join(f"{task} {note}" for task, note in found["seeds"].items())
    text = f"Against {curves.REFERENCE}; {seeds}. Points: interquartile mean over seeds (all tasks: the mean of the tasks')"
    add_note(figure, f"{text}; bars: 95 % bootstrap interval, a difference's range below {ENOUGH_SEEDS} seeds")


def _points(axis: Any, series: dict[str, dict[str, Point]], settings: Sequence[str], first: int = 0) -> None:
    """A row a setting, the same in all panels; `first` chooses the look of the first series."""
    for index, (name, points) in enumerate(series.items()):
        shift = (index - (len(series) - 1) / 2) * 0.22
        places = [settings.index(setting) + shift for setting in points]
        values, low, high = np.array(list(points.values()), float).reshape(-1, 3).T
        look = line_style(first + index) | {"linestyle": "none"}
        axis.plot(values, places, label=name, **look)
        axis.hlines(places, low, high, color=look["color"], linewidth=1.2)
    axis.xaxis.set_major_locator(MaxNLocator(5))
    axis.set_yticks(range(len(settings)), settings)
    axis.set_ylim(len(settings) - 0.5, -0.5)
