"""The other ablations, a setting a row: outcomes and costs against each ablation's own reference, paired by seed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from harnessrl.config import read_yaml
from harnessrl.results import PRIMARY, Results
from harnessrl.statistics import ENOUGH_SEEDS
from paper_figs.curves import take_in
from paper_figs.outcomes import Point, difference
from paper_figs.style import GREY, add_note, label_panels, line_style

NAMES = ("estimators", "unit", "credit", "zero_signal", "split_updates", "merging")
"""ablations/NAME.yaml, all on the lookup experiment."""
FILES = tuple(f"ablations/results/{name}/summary.csv" for name in NAMES)
DATA, ALSO = FILES[:1], FILES[1:]
MAKE = "harnessrl ablate ablations/estimators.yaml results=ablations/results/estimators"
COSTS = {"computed_tokens": "computed tokens"}
"""No seconds: rows of one ablation were made beside different other work. `harnessrl bench train` measures time."""


def rebuild(runs: Path, root: Path) -> list[str]:
    """`take_in` of these ablations."""
    return take_in(NAMES, runs, root)


def numbers(root: Path) -> dict[str, Any]:
    """By ablation: seeds; the reference; by outcome or cost each other setting's difference, or ratio, to it."""
    found = {}
    for name in NAMES:
        results = Results.read(root / "ablations" / "results" / name)
        if not results.runs:
            continue
        data = read_yaml(root / "ablations" / f"{name}.yaml")
        reference = data["reference"]
        others = [setting for setting in data["settings"] if setting in results.settings and setting != reference]
        found[name] = {
            "reference": reference,
            "seeds": min(len(results.outcome(setting, "steps")) for setting in results.settings),
            "difference": {
                key: {one: difference(results.outcome(one, key), results.outcome(reference, key)) for one in others}
                for key in PRIMARY
            },
            "ratio": {key: {one: _ratio(results, one, reference, key) for one in others} for key in COSTS},
        }
    return found


def _ratio(results: Results, setting: str, reference: str, key: str) -> Point:
    """`difference` of logarithms, as a factor."""
    logs = [{seed: np.log(value) for seed, value in results.outcome(one, key).items()} for one in (setting, reference)]
    value, low, high = difference(*logs)
    return float(np.exp(value)), float(np.exp(low)), float(np.exp(high))


def draw(figure: Figure, found: dict[str, Any]) -> None:
    """A column an outcome, a row a setting; ablations are told apart by colour and mark."""
    rows = [(name, setting) for name, parts in found.items() for setting in next(iter(parts["difference"].values()))]
    figure.set_size_inches(10.0, 1.5 + 0.22 * len(rows))
    axes = figure.subplots(1, len(PRIMARY) + len(COSTS), sharey=True)
    columns = [("difference", key, f"{label}: difference", 0.0) for key, label in PRIMARY.items()]
    columns += [("ratio", key, f"{label}: ratio", 1.0) for key, label in COSTS.items()]
    for axis, (kind, key, title, nothing) in zip(axes, columns, strict=True):
        for index, (name, parts) in enumerate(found.items()):
            _points(axis, rows, name, parts[kind][key], index)
        axis.axvline(nothing, color="black", linewidth=0.8)
        axis.set_title(title)
    axes[0].set_yticks(range(len(rows)), [f"{setting} ({found[name]['reference']})" for name, setting in rows])
    axes[0].set_ylim(len(rows) - 0.5, -0.5)
    edges = [at for at in range(1, len(rows)) if rows[at][0] != rows[at - 1][0]]
    for axis in axes:
        axis.hlines(
            [edge - 0.5 for edge in edges], 0, 1, transform=axis.get_yaxis_transform(), color=GREY, linewidth=0.4
        )
    label_panels(axes)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(found))
    seeds = ", ".join(f"{name} {parts['seeds']}" for name, parts in found.items())
    add_note(
        figure,
        "lookup; against the setting in brackets, paired by seed; interquartile mean with 95 % bootstrap interval (below "
        f"{ENOUGH_SEEDS} seeds the range).\nSeeds: {seeds}.",
    )


def _points(axis: Any, rows: Sequence[tuple[str, str]], name: str, points: dict[str, Point], index: int) -> None:
    places = [rows.index((name, setting)) for setting in points]
    values, low, high = np.array(list(points.values()), float).reshape(-1, 3).T
    look = line_style(index) | {"linestyle": "none"}
    axis.plot(values, places, label=name, **look)
    axis.hlines(places, low, high, color=look["color"], linewidth=1.2)
