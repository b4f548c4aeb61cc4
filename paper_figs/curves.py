"""From the tables of an ablation to curves with bands; which tables there are, and how they come from runs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from harnessrl.grid import Grid, only_writer, read_grid
from harnessrl.report import SMOOTH, seeds_of, smooth
from harnessrl.results import Results
from harnessrl.statistics import ENOUGH_SEEDS, interquartile_mean, interval

TASKS = {"lookup": "normalization", "babyai": "normalization_babyai"}
"""Our experiments, and the ablation (ablations/NAME.yaml, ablations/results/NAME) that compares normalisers on each."""
SEEDS = {"lookup": 10, "babyai": 5}
"""Seeds of their committed rows."""
REFERENCE = "rollout+rollout-mean"
"""The setting that others are compared with, and the one whose curve stands for an experiment."""


def tables(task: str) -> tuple[str, ...]:
    """The files of a task's ablation, from the checkout's root."""
    return tuple(f"ablations/results/{TASKS[task]}/{name}.csv" for name in ("summary", "curves"))


def make(task: str) -> str:
    """The command that makes them."""
    return f"harnessrl ablate ablations/{TASKS[task]}.yaml results=ablations/results/{TASKS[task]} seeds={SEEDS[task]}"


def read_tasks(root: Path) -> dict[str, Results]:
    """The results of each task that has any."""
    found = {task: Results.read(root / "ablations" / "results" / name) for task, name in TASKS.items()}
    return {task: results for task, results in found.items() if results.runs}


def band(results: Results, setting: str, key: str, steps: int = SMOOTH) -> dict[str, Any] | None:
    """A setting's interquartile mean over seeds with its interval, after a running mean of `steps` steps.

    Steps at which a seed has no value are left out, before anything is averaged. Returns None where none is left.

    Returns:
        steps int [n] (updates that the policy had seen), line, low, high float64 [n]; runs [seeds][n], the single seeds
        below `ENOUGH_SEEDS`, where the band is their range.
    """
    if setting not in results.settings:
        return None
    values = results.curve(setting, key)
    at = np.flatnonzero(~np.isnan(values).any(axis=0))
    if not len(at):
        return None
    values = smooth(values[:, at], steps)
    low, high = interval(values)
    runs = values if len(values) < ENOUGH_SEEDS else values[:0]
    return {"steps": at, "line": interquartile_mean(values), "low": low, "high": high, "runs": runs}


def paired(results: Results, setting: str, key: str, window: int) -> dict[str, list[float]]:
    """A setting's difference to the reference on common seeds, by windows of steps: `interval` and its middle.

    Args:
        window: steps that a value is the mean of, before seeds are paired; steps without a value are left out.

    Returns:
        steps (the window's middle, as `band` counts), value, low, high; [windows] each.
    """
    both = [results.only(key for key in results.runs if key[0] == name) for name in (setting, REFERENCE)]
    common = sorted(set.intersection(*({seed for _, seed in one.runs} for one in both)))
    ours, theirs = (
        one.only((name, seed) for seed in common).curve(name, key)
        for one, name in zip(both, (setting, REFERENCE), strict=True)
    )
    found: dict[str, list[float]] = {"steps": [], "value": [], "low": [], "high": []}
    steps = min(ours.shape[1], theirs.shape[1]) if common else 0
    for start in range(0, steps, window):
        a, b = (values[:, start : min(start + window, steps)] for values in (ours, theirs))
        at = np.flatnonzero(~np.isnan(a).any(axis=0) & ~np.isnan(b).any(axis=0))
        if len(at):
            values = a[:, at].mean(axis=1) - b[:, at].mean(axis=1)
            row = (start + at.mean(), interquartile_mean(values), *interval(values))
            for name, number in zip(found, row, strict=True):
                found[name].append(float(number))
    return found


def bands(results: Results, key: str, steps: int = SMOOTH) -> dict[str, dict[str, Any]]:
    """`band` of every setting that has any value."""
    found = {setting: band(results, setting, key, steps) for setting in results.settings}
    return {setting: drawn for setting, drawn in found.items() if drawn is not None}


def note(results: Results) -> str:
    """What the lines and bands are."""
    fewest = min((len(results.outcome(setting, "steps")) for setting in results.settings), default=0)
    kind = "95 % bootstrap interval" if fewest >= ENOUGH_SEEDS else "range (thin: single seeds)"
    return f"{seeds_of(results)}; line: interquartile mean, band: {kind}"


def grid_of(name: str, runs: Path, root: Path) -> Grid | None:
    """The grid of an ablation whose runs lie below `runs`, as many seeds as there are folders of; None where there are none."""
    names = [folder.name.removeprefix("seed-") for folder in (runs / "ablations" / name).glob("*/seed-*")]
    seeds = [int(seed) for seed in names if seed.isdecimal() and len(seed) < 4]
    if not seeds:
        return None
    words = [f"seeds={max(seeds) + 1}", f"runs={runs}", f"results={root / 'ablations' / 'results' / name}"]
    return read_grid(root / "ablations" / f"{name}.yaml", words)


def rebuild(runs: Path, root: Path) -> list[str]:
    """`take_in` of the ablations that compare normalisers."""
    return take_in(TASKS.values(), runs, root)


def take_in(names: Iterable[str], runs: Path, root: Path) -> list[str]:
    """Take every finished run of these ablations below RUNS/ablations into the committed tables; rows of other runs stay.

    Raises:
        ConfigError: a run is recorded under another configuration.
    """
    told = []
    for name in names:
        folder = root / "ablations" / "results" / name
        grid = grid_of(name, runs, root)
        if grid is None:
            continue
        finished = [cell for cell in grid.cells if cell.done]
        with only_writer(folder):
            results = Results.read(folder)
            for cell in finished:
                results.has(cell.key, cell.config)
                results.add(cell.key, cell.config)
            if finished:
                grid.write(results)
        told.append(f"ablations/results/{name}: {len(finished)} finished runs of {runs / 'ablations' / name}")
    return told
