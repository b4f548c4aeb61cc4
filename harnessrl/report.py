"""What an ablation found: a table with intervals, and curves."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from harnessrl.results import PRIMARY, Results
from harnessrl.statistics import (
    ENOUGH_SEEDS,
    interquartile_mean,
    interval,
    paired_differences,
    probability_of_improvement,
    sign_flip_p,
)

DESCRIPTION = {
    "samples_per_rollout": "N_rho",
    "single_sample_share": "single-\nsample",
    "entropy_final": "final\nentropy",
}


def summary_tables(name: str, results: Results, reference: str) -> list[Table]:
    """Each setting's interquartile means with intervals; and what the primary outcomes differ from the reference's."""
    values = _table(
        f"{name}: interquartile mean over {seeds_of(results)}\n"
        f"(below it the 95 % bootstrap interval; of fewer than {ENOUGH_SEEDS} the range)"
    )
    for label in (*PRIMARY.values(), *DESCRIPTION.values()):
        values.add_column(label.replace(" ", "\n", 1), justify="right", no_wrap=True)
    for setting in results.settings:
        cells = [_cell(results, setting, key) for key in (*PRIMARY, *DESCRIPTION)]
        values.add_row(setting, *cells, end_section=True)
    if reference not in results.settings:
        values.caption = f"no differences: the reference, {reference}, is not among these settings"
    if len(results.settings) == 1 or reference not in results.settings:
        return [values]
    against = _table(
        f"difference to {reference}, paired by seed\n"
        "(p: of a two-sided sign-flip test; P: probability that a run is higher)"
    )
    for label in PRIMARY.values():
        against.add_column(label, justify="right", no_wrap=True)
        against.add_column("p\nP", justify="right", no_wrap=True)
    for setting in results.settings:
        if setting != reference:
            against.add_row(
                setting, *(x for key in PRIMARY for x in _against(results, setting, reference, key)), end_section=True
            )
    return [values, against]


def _table(title: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("setting", no_wrap=True)
    return table


def _cell(results: Results, setting: str, key: str) -> str:
    values = np.array(list(results.outcome(setting, key).values()))
    low, high = interval(values)
    return f"{interquartile_mean(values):.3f}\n{low:.2f}–{high:.2f}"


def _against(results: Results, setting: str, reference: str, key: str) -> tuple[str, str]:
    """The paired difference with its interval; its p with the probability of improvement."""
    ours, theirs = results.outcome(setting, key), results.outcome(reference, key)
    differences = paired_differences(ours, theirs)
    if len(differences) == 0:
        return "no common seed", ""
    low, high = interval(differences)
    better = probability_of_improvement(*(np.array(list(values.values())) for values in (ours, theirs)))
    p = f"{sign_flip_p(differences):.3f}" if len(differences) <= 20 else ""
    return f"{interquartile_mean(differences):+.3f}\n{low:+.3f} to {high:+.3f}", f"{p}\n{better:.2f}"


def seeds_of(results: Results) -> str:
    """How many seeds the settings have: "1 seed", "5 seeds", or "5 to 7 seeds"."""
    counts = {len(results.outcome(setting, "steps")) for setting in results.settings} or {0}
    return " to ".join(map(str, sorted({min(counts), max(counts)}))) + (" seed" if counts == {1} else " seeds")


PANELS = {
    "reward/mean": "mean reward",
    "policy/entropy": "entropy (nats a token)",
    "rollout/samples_mean": "samples per rollout, N_rho",
    "rollout/drift_share": "share of drifting responses",
}
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
"""Okabe and Ito's palette, told apart by most colour-blind readers; line styles tell them apart in grey."""
STYLES = ("-", (0, (5, 2)), "-.", ":", (0, (9, 2, 1, 2, 1, 2)), (0, (3, 1, 1, 1)), (0, (1, 3)))
SMOOTH = 5


def draw_curves(path: Path, results: Results, reported: Sequence[str]) -> None:
    """Draw each setting's curves over its seeds to a picture. Steps that not all seeds of a setting have are left out."""
    curves = {name: {key: results.curve(name, key) for key in PANELS} for name in results.settings}
    kind = f"band: 95 % bootstrap interval; of fewer than {ENOUGH_SEEDS} the range, with single seeds as points"
    save(panels(curves, [f"{seeds_of(results)}; line: interquartile mean; {kind}", *reported]), path)


def panels(curves: Mapping[str, Mapping[str, np.ndarray]], notes: Sequence[str] = ()) -> Figure:
    """A panel for each of `PANELS`: `draw_setting` of every name's [seeds, steps]; lines of text at the foot."""
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True)
    for axis, (key, label) in zip(axes.flat, PANELS.items(), strict=True):
        for index, (name, by_key) in enumerate(curves.items()):
            draw_setting(axis, by_key[key], name, index)
        axis.set_ylabel(label)
        axis.grid(alpha=0.25)
    for axis in axes[1]:
        axis.set_xlabel("step")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
    text = "\n".join([f"Running mean of {SMOOTH} steps.", *notes])
    figure.supxlabel(text, fontsize=7.5, x=0.01, ha="left")
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a picture in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.stem}.tmp{path.suffix}")
    figure.savefig(temporary, dpi=140)
    temporary.replace(path)


def draw_setting(axis: Any, values: np.ndarray, label: str, index: int) -> None:
    """One setting's curve and band; `values` is [seeds, steps], `index` chooses colour and line style."""
    if not values.size:
        return
    steps = np.flatnonzero(~np.isnan(values).all(axis=0)) + 1  # a last row may hold a validation alone
    values = smooth(values)[:, steps - 1]
    low, high = interval(values)
    colour = COLOURS[index % len(COLOURS)]
    axis.plot(steps, interquartile_mean(values), color=colour, linestyle=STYLES[index % len(STYLES)], label=label)
    axis.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
    if len(values) < ENOUGH_SEEDS:
        marks = steps[4 + index :: 10] - 1
        for curve in values:
            axis.plot(steps[marks], curve[marks], ".", color=colour, markersize=3.5)


def smooth(values: np.ndarray, steps: int = SMOOTH) -> np.ndarray:
    """Running mean over the last `steps` columns (fewer at the start), NaN left out; [seeds, steps]."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the mean of no value is NaN, which is what is meant
        means = [np.nanmean(values[:, max(0, i - steps + 1) : i + 1], axis=1) for i in range(values.shape[1])]
    return np.stack(means, axis=1)
